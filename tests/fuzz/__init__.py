"""An attack on the library from outside: random cases of everything it promises, for as long as there is time.

``python -m tests.fuzz`` from the repository's root, or ``make soak``; ``--help`` says more, README.md what is drawn.
A case is a function of its suite and its seed: one that fails prints the command that runs it alone. ``test_fuzz.py``
runs a slice in CI, and every program that failed once.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1])
if _TESTS not in sys.path:  # helpers that the tests share
    sys.path.append(_TESTS)
