"""Draw results/<benchmark>-light.svg and -dark.svg from the results/<benchmark>.csv of which there is a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.plot import plot
from harness.report import RESULTS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("csv", type=Path, nargs="*", help="files to draw (default: all of results/)")
    options.add_argument("--folder", type=Path, help="where pictures go (default: beside their rows)")
    chosen = options.parse_args()
    for path in chosen.csv or sorted(RESULTS.glob("*.csv")):
        picture = plot(path, chosen.folder)
        print(f"{path.name}: " + (f"drew {picture}" if picture else "has no picture"))


if __name__ == "__main__":
    main()
