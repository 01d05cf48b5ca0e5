"""Draw results/<benchmark>.png from every results/<benchmark>.csv that has shares of a copy's bandwidth."""

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
        print(f"{path.name}: " + (f"drew {picture}" if picture else "no shares to draw"))


if __name__ == "__main__":
    main()
