"""Explanation of the fused operations that a list gets under a recipe, with the reasons for the rest."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..recipe import Recipe
from ..state import checked_recipe, get_autocast_state, set_autocast_state
from .boundary import Fused
from .fused.pattern import Fusion, NearMiss
from .fuser import OperationFuser
from .registry import REGISTRY


@dataclass(frozen=True)
class ChosenOperation:
    """An operation that runs. ``direction``: "forward" or "backward". ``numbers``: of the basic operations it runs,
    counted over the whole list. ``basic_ops``: their class names."""

    direction: str
    name: str
    numbers: tuple[int, ...]
    basic_ops: tuple[str, ...]

    @property
    def is_fused(self) -> bool:
        """Whether it stands for other operations."""
        return self.name != self.basic_ops[0]

    def row(self) -> tuple[str, str, str]:
        """Return its row of the printed table."""
        first, last = self.numbers[0], self.numbers[-1]
        numbers = str(first) if first == last else f"{first}-{last}"
        return numbers, self.name, " + ".join(self.basic_ops) if self.is_fused else ""


@dataclass(frozen=True)
class MissedFusion:
    """A pattern that was there with a condition that does not hold.

    ``direction``: "forward", "backward" or "both". ``number``: of the basic operation that it begins at.
    """

    direction: str
    name: str
    number: int
    reason: str


@dataclass(frozen=True)
class HandedOver:
    """Quantized data that one operation hands to its neighbor, most often out of the kernel that computes it.

    ``direction``: "forward" or "backward". ``giver``, ``taker``: class names. ``numbers``: of the basic operations on
    both sides, the giver's first.
    """

    direction: str
    giver: str
    taker: str
    numbers: tuple[int, int]


@dataclass(frozen=True)
class Explanation:
    """The operations that run, in order, tensors handed over quantized, and near misses of fusions."""

    forward: tuple[ChosenOperation, ...]
    backward: tuple[ChosenOperation, ...]
    handed_over: tuple[HandedOver, ...]
    near_misses: tuple[MissedFusion, ...]

    def __str__(self) -> str:
        handed = [
            (f"{one.numbers[0]} to {one.numbers[1]}", f"{one.giver} to {one.taker}", one.direction)
            for one in self.handed_over
        ]
        missed = [
            (str(miss.number), f"{miss.name} ({miss.direction})", miss.reason) for miss in self.near_misses
        ]
        lines = ["forward", *_aligned([one.row() for one in self.forward])]
        lines += ["backward", *_aligned([one.row() for one in self.backward])]
        lines += ["handed over quantized", *_aligned(handed)] if handed else []
        lines += ["not fused", *_aligned(missed)] if missed else []
        return "\n".join(lines)


def explain(fusers: Sequence[OperationFuser], recipe: Recipe | str | None) -> Explanation:
    """Print, and return, what the fusers run under a recipe when every operation has a backward.

    Raises:
        TypeError: ``recipe`` is neither a recipe nor None.
    """
    recipe = checked_recipe(recipe, "explain")
    forward: list[ChosenOperation] = []
    backward: list[ChosenOperation] = []
    handed_over: list[HandedOver] = []
    missed: list[MissedFusion] = []
    begin = 0
    for fuser in fusers:
        fused = fuser.fused(recipe)
        forward.extend(_chosen("forward", op, where, begin) for op, where in fused.forward)
        group = [_chosen("backward", op, where, begin) for op, where in fused.backward]
        backward[:0] = group[::-1]
        with _asked_under(recipe, fuser):
            handed_over.extend(_handed_over(fused, begin))
        missed.extend(_near_misses(fuser, recipe, begin, [*forward, *group]))
        begin += len(fuser.basic_ops)
    explanation = Explanation(tuple(forward), tuple(backward), tuple(handed_over), tuple(missed))
    print(explanation)
    return explanation


def _chosen(direction: str, op: Any, where: tuple[int, ...], begin: int) -> ChosenOperation:
    names = tuple(type(one).__name__ for one in op.basic_ops)
    return ChosenOperation(direction, type(op).__name__, tuple(begin + index for index in where), names)


@contextlib.contextmanager
def _asked_under(recipe: Recipe | None, fuser: OperationFuser) -> Iterator[None]:
    """A recipe in force for operations to be asked under, without a step beginning or being noted."""
    before, noted = get_autocast_state(), [dict(vars(op)) for op in fuser.basic_ops]
    set_autocast_state((recipe, None, None, 1))
    try:
        yield
    finally:
        set_autocast_state(before)
        for op, attributes in zip(fuser.basic_ops, noted):
            vars(op).update(attributes)


def _handed_over(fused: Fused, begin: int) -> list[HandedOver]:
    found = []
    for (front, at), (behind, after) in itertools.pairwise(fused.forward):
        if front.quantizes_output and behind.get_input_quantizer() is not None:
            numbers = (begin + at[-1], begin + after[0])
            found.append(HandedOver("forward", type(front).__name__, type(behind).__name__, numbers))
    for (front, at), (behind, after) in itertools.pairwise(fused.backward):
        if behind.quantizes_grad_input and front.get_grad_output_quantizer() is not None:
            numbers = (begin + after[0], begin + at[-1])
            found.append(HandedOver("backward", type(behind).__name__, type(front).__name__, numbers))
    return found


def _near_misses(
    fuser: OperationFuser, recipe: Recipe | None, begin: int, chosen: Sequence[ChosenOperation]
) -> list[MissedFusion]:
    """Return each pattern's answer about the basic operations that no other fused operation runs."""
    missed = []
    registered = (("both", REGISTRY.joint), ("forward", REGISTRY.forward), ("backward", REGISTRY.backward))
    for direction, functions in registered:
        fused = {
            number
            for one in chosen
            if direction in ("both", one.direction) and len(one.numbers) > 1
            for number in one.numbers
        }
        for fusion in functions:
            for start in range(len(fuser.basic_ops)) if isinstance(fusion, Fusion) else ():
                found = fusion.look(fuser.basic_ops, start, recipe)
                if isinstance(found, NearMiss) and begin + start not in fused:
                    missed.append(MissedFusion(direction, fusion.name, begin + start, found.reason))
    return missed


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    return [f"  {number:>{widths[0]}}  {name:<{widths[1]}}  {rest}".rstrip() for number, name, rest in rows]
