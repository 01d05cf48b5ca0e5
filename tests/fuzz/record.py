"""Which rows of a list of defects the fuzzer finds in an older state of the package, and after how many cases.

``PYTHONPATH=OLDER/src python -m tests.fuzz.record LOG...`` reads logs (``--out``) of runs on that state: a failure is
counted to the first row whose words it has. The words name what the row is about, not a case.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Row, suite, what a failure of it says or has in its smallest program.
ROWS = (
    ("C1", "histories", r"^Difference: (eager|plain).*(\"flags\": \[(true|false)|\"flag\": (true|false))"),
    ("C17", "histories", r"modified by an inplace operation.*delayed"),
    ("C18", "histories|converted", r"is a view and is being modified inplace"),
    ("C19", "classes", r"_Runner__main__|ObjNotFoundError"),
    ("C20", "classes", r"Guard failed on the same frame"),
    ("C21", "histories", r"HybridQuantizedTensorStorage do not say its shape"),
    ("C7", "updates", r"Difference: parameter after"),
    ("C22", "updates", r"IndexError|KeyError"),
    ("C25", "updates", r"multi_tensor"),
    ("C25", "chains", r"after as_strided"),
    ("C8", "chains", r"Difference.*after (split|slice|chunk|narrow|split_sizes|unbind|as_strided)"),
    ("C9", "masks", r"attention, "),
    ("C10", "classes", r"operands of a user's quantizer"),
    ("C11", "ranks", r"quantize with a group"),
    ("C12", "ranks", r"scales differ between ranks"),
    ("D2", "ranks", r"ddp: output of rank"),
    ("C13", "operands|ranks", r"in force wants|decoded operands.*by_type\": true"),
    ("C15", "routing", r"scores of"),
    ("C16", "converted", r"the router .* runs in low precision"),
    ("C23", "recipes", r"the constructor takes what assignments do not"),
    ("D8", "recipes", r"JSON|Format|Recursion|KeyError|AttributeError|TypeError|ValueError"),
)


def failures(files: list[str]) -> Iterator[tuple[str, int, str, dict[str, str]]]:
    for file in files:
        for suite in json.loads(Path(file).read_text())["suites"]:
            for failure in suite["failures"]:
                text = " ".join((failure["error"], failure["traceback"][-3000:], failure["drawn"]))
                yield suite["name"], int(failure["case"]) + 1, " ".join(text.split()), failure


def main() -> int:
    found: dict[str, tuple[int, str]] = {}
    rest = []
    for suite, case, text, failure in failures(sys.argv[1:]):
        for row, suites, words in ROWS:
            if re.fullmatch(suites, suite) and re.search(words, text):
                found.setdefault(row, (case, failure["repro"]))
                break
        else:
            rest.append((suite, failure["seed"], failure["kind"]))
    for row, (case, repro) in sorted(found.items(), key=lambda one: (one[0][0], int(one[0][1:]))):
        print(f"{row:4} case {case:5}  {repro}")
    for suite, seed, kind in rest:
        print(f"  ?  {suite} {seed}: {kind[:150]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
