"""Write to the corpus what failed in a log and passes now: ``python -m tests.fuzz.keep LOG... [--limit 3]``.

A log is the text that a run printed. Of each kind of failure so many programs are kept, the smallest first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from pathlib import Path

from . import suites
from .corpus import FOLDER, files
from .runner import outcome

BLOCK = re.compile(r"^FAILED (\w+) seed (\d*): .*?\n  (.*?)\n(?:.*\n){0,40}?  drawn: (\{.*\})$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=2)
    arguments = parser.parse_args()
    known = {suite.name: suite for suite in suites.all_suites() if suite.draw}
    entries = [json.loads(file.read_text()) for file in files()]
    counts: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = (entry["suite"], entry["was"])
        counts[key] = counts.get(key, 0) + 1
    programs = {json.dumps(entry["program"]) for entry in entries}
    found = [match.groups() for log in arguments.logs for match in BLOCK.finditer(log.read_text())]
    FOLDER.mkdir(exist_ok=True)
    for name, seed, was, text in sorted(found, key=lambda one: len(one[3])):
        if name not in known or counts.get((name, was), 0) >= arguments.limit or text in programs:
            continue
        program = json.loads(text)
        error = outcome(known[name], program)
        if error is not None:
            print(f"still fails: {name} {seed}: {was}", flush=True)
            continue
        counts[name, was] = counts.get((name, was), 0) + 1
        programs.add(text)
        entry = {"suite": name, "found": str(datetime.date.today()), "was": was, "program": program}
        (FOLDER / f"{name}-{seed}.json").write_text(json.dumps(entry, indent=1) + "\n")
        print(f"kept: {name}-{seed}: {was}", flush=True)


if __name__ == "__main__":
    main()
