"""``python -m tests.fuzz --minutes 60 --device cpu``."""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

import torch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    parser.add_argument("--suite", action="append", help="one suite alone; may be given again (default: all)")
    parser.add_argument(
        "--seed", type=int, help="of the first case; the next has the next (default: a new one, printed)"
    )
    parser.add_argument(
        "--program", type=Path, action="append", help="run files of the corpus, or what a failure printed"
    )
    parser.add_argument("--no-shrink", action="store_true", help="report failing programs as they were drawn")
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
    from . import programs, runner, suites
    from .corpus import run_file
    from .runner import report, run

    known = suites.all_suites()
    chosen = [suite for suite in known if arguments.suite is None or suite.name in arguments.suite]
    if not chosen or any(name not in [suite.name for suite in known] for name in arguments.suite or ()):
        parser.error(f"--suite {arguments.suite}: use {', '.join(suite.name for suite in known)}")
    runner.SHRINK = 0.0 if arguments.no_shrink else runner.SHRINK
    programs.DEVICE = arguments.device
    if arguments.program:
        passed = [run_file(file, known) for file in arguments.program]
        return 0 if all(passed) else 1
    seed, cases = arguments.seed, arguments.cases
    if seed is None:
        seed = random.SystemRandom().randrange(10**9)
        print(f"--seed {seed}", flush=True)
    elif cases is None and "--minutes" not in sys.argv:
        cases = 1  # one seed alone: that case
    effort = arguments.effort if arguments.effort is not None else min(arguments.minutes / 60, 1.0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run(
        chosen,
        device=arguments.device,
        minutes=arguments.minutes,
        seed=seed,
        cases=cases,
        effort=effort,
    )
    report(chosen, arguments.device, arguments.out)
    return 1 if any(suite.failures for suite in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
