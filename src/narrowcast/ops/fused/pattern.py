"""Records of fused operations: the pattern that each replaces, its conditions and its wiring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..._checks import shown
from ...recipe import Recipe
from ..contract import FusibleOperation
from ..fuser import inner_channel
from ..op import BasicOperation, FusedOperation


@dataclass(frozen=True)
class Match:
    """The pattern is there: it takes ``length`` operations."""

    length: int


@dataclass(frozen=True)
class NearMiss:
    """The operations are there, but a condition does not hold; ``reason`` says which, for the reader of ``explain``."""

    reason: str


Matched = Match | NearMiss | None


@dataclass(frozen=True)
class Fusion:
    """One way to replace a run of basic operations by a fused one; registers like a function ``(ops, *, recipe)``.

    ``name``: of the fused operation. ``direction``: where it is registered. ``match(ops, start, recipe)``: whether the
    run that starts at ``start`` is the pattern; pure, and traceable. ``build(basic_ops)``: makes the fused operation.
    """

    name: str
    direction: Literal["forward", "backward", "both"]
    match: Callable[[Sequence[FusibleOperation], int, Recipe | None], Matched]
    build: Callable[[list[BasicOperation]], FusedOperation]

    def __call__(self, ops: Sequence[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
        """Return the operations with every match replaced, scanned from left to right."""
        fused: list[FusibleOperation] = []
        start = 0
        while start < len(ops):
            found = self.look(ops, start, recipe)
            if isinstance(found, Match):
                run: list[Any] = list(ops[start : start + found.length])
                fused.append(self.build(run))
                start += found.length
            else:
                fused.append(ops[start])
                start += 1
        return fused

    def look(self, ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
        """Return :attr:`match`, unless a channel begins and ends inside the run, whose values come too late."""
        found = self.match(ops, start, recipe)
        if isinstance(found, Match):
            channel = inner_channel(ops[start : start + found.length])
            if channel is not None:
                return NearMiss(f"channel {shown(channel)} begins and ends inside")
        return found


def follows(ops: Sequence[FusibleOperation], start: int, *kinds: type | tuple[type, ...]) -> bool:
    """Return whether the operations from ``start`` on are of these kinds, one after the other."""
    run = ops[start : start + len(kinds)]
    return len(run) == len(kinds) and all(isinstance(op, kind) for op, kind in zip(run, kinds))


def exactly(ops: Sequence[FusibleOperation], start: int, *kinds: type) -> bool:
    """Return whether the operations from ``start`` on are of these classes; a subclass may compute something else."""
    return tuple([type(op) for op in ops[start : start + len(kinds)]]) == kinds
