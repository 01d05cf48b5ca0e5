"""``python -m tests.soak --minutes 60 --device cpu``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    parser.add_argument("--suite", action="append", help="one suite alone; may be given again (default: all)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first case; the next has the next (default 0)"
    )
    parser.add_argument("--cases", type=int, help="so many cases of each suite instead of --minutes")
    parser.add_argument(
        "--effort", type=float, help="length of long cases; 1 is 1000 cycles (default: by --minutes)"
    )
    parser.add_argument("--out", type=Path, help="write figures and failures as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cpu":  # before anything imports Triton, which reads it once
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is visible to torch")
    from . import suites
    from .runner import report, run

    known = suites.all_suites()
    chosen = [suite for suite in known if arguments.suite is None or suite.name in arguments.suite]
    if not chosen or any(name not in [suite.name for suite in known] for name in arguments.suite or ()):
        parser.error(f"--suite {arguments.suite}: use {', '.join(suite.name for suite in known)}")
    effort = arguments.effort if arguments.effort is not None else min(arguments.minutes / 60, 1.0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run(
        chosen,
        device=arguments.device,
        minutes=arguments.minutes,
        seed=arguments.seed,
        cases=arguments.cases,
        effort=effort,
    )
    report(chosen, arguments.device, arguments.out)
    return 1 if any(suite.failures for suite in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
