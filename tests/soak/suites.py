"""The suites, and their shares of the time."""

from __future__ import annotations

from . import compiled, cycles, encodings, options, products, resume, semantics, special
from .runner import Suite


def all_suites() -> list[Suite]:
    """Fresh records of every suite."""
    return [
        Suite("products", products.case, 3.0),
        Suite("encodings", encodings.case, 2.0),
        Suite("special", special.case, 1.0),
        Suite("semantics", semantics.case, 2.0),
        Suite("options", options.case, 1.0),
        Suite("compiled", compiled.case, 2.0),
        Suite("cycles", cycles.case, 1.0),
        Suite("resume", resume.case, 1.0),
    ]
