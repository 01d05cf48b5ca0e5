"""Programs that failed once: files of JSON, each with its suite, what it was and what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from . import programs
from .runner import Suite, outcome

FOLDER = Path(__file__).resolve().parent / "corpus"


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def run_file(file: Path, suites: list[Suite]) -> bool:
    """Run one file's program; whether it passes."""
    entry = json.loads(file.read_text())
    suite = next(suite for suite in suites if suite.name == entry["suite"])
    error = outcome(suite, entry["program"])
    if error is None:
        return True
    print(f"FAILED {file.name}: {programs.signature(error)}\n  {error}", file=sys.stderr)
    return False
