"""An attack on the library from outside: random cases of everything it promises, for as long as there is time.

``python -m tests.soak`` from the repository's root, or ``make soak``; ``--help`` says the rest. A case is a function of
its suite and its seed: a case that fails prints the command that runs it alone. ``test_soak.py`` runs a slice in CI.
"""
