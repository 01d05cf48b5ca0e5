"""Delayed scaling to the rounding: the scales a forward must read, and its products of operands cast with these.

Scales are constant within a step. A step makes them from the amaxes that its calls have shown, by the rule of
docs/concepts.md, which is written out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import narrowcast as nc

from .programs import Difference

_ROUNDED = 1e-5


class Past:
    """What the calls of a layer have shown of one operand since the last step, and the scale that steps have made."""

    def __init__(self) -> None:
        self.rows, self.pending, self.scale, self.amax = [0.0], 0.0, 0.0, 0.0

    def collect(self, operand: Tensor) -> None:
        self.pending = max(self.pending, _amax(operand))

    def fit(self, length: int) -> None:
        """A forward in training makes the history as long as its recipe's, and what a shorter one drops is gone."""
        self.rows = (self.rows + length * [0.0])[:length]

    def renew(self, recipe: Any, kind: str) -> None:
        """End a step: of what was seen, the scale follows by the recipe in force."""
        if 0.0 < self.pending < math.inf:
            recent = recipe.amax_compute_algo == "most_recent"
            self.amax = self.pending if recent else max(self.pending, *self.rows)
            self.scale = _scale_of(recipe, kind, self.amax, self.scale)
            self.rows = [0.0, *self.rows[2:], self.pending][: recipe.amax_history_len]
        self.pending = 0.0


class Read(NamedTuple):
    """The scales of one forward, and the recipe."""

    recipe: Any
    scales: dict[str, float]

    def cast(self, operand: Tensor, kind: str) -> Tensor:
        """Return what the operand is after a cast to FP8, decoded, fp64."""
        e5m2 = kind == "grad_output"
        largest = 57344.0 if e5m2 else 448.0
        # 0: nothing was seen, and the scale is that of the operand's own amax, as that of a weight always is
        scale = self.scales[kind] or _scale_of(self.recipe, kind, _amax(operand), 1.0)
        scaled = operand.float() * torch.tensor(scale)
        codes = scaled.clamp(-largest, largest).to(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
        return codes.double() / scale


class Exact:
    """What every ``Linear`` under delayed scaling must have read, and what follows from it."""

    def __init__(self) -> None:
        self.past: dict[Any, dict[str, Past]] = {}
        self.recipes: dict[Any, Any] = {}
        self.weight_grads: dict[Any, tuple[Tensor, float]] = {}
        self.partly: set[Any] = set()
        self.changed = False

    def forget(self) -> None:
        """Another recipe is in force, of whose history no call has told."""
        self.past, self.changed = {}, True

    def renew(self) -> None:
        """End a step, as the optimizer does."""
        for layer, past in self.past.items():
            for kind, one in past.items():
                one.renew(self.recipes[layer], kind)

    def suits(self, layer: Any, kind: str, operand: Tensor) -> bool:
        """Whether the scale that the steps before make of an operand suits what it is now."""
        past = self.past.get(layer)
        told = past[kind].amax if past is not None else 0.0
        if not told:
            return not self.changed  # it has the scale of its own amax
        return told / 50 <= _amax(operand) <= 1.1 * told

    def start_of_step(self) -> None:
        self.weight_grads, self.partly = {}, set()

    def end_of_step(self) -> None:
        for layer, (wanted, terms) in self.weight_grads.items():
            if layer not in self.partly and layer.weight.requires_grad and layer.weight.grad is not None:
                _check(layer.weight.grad, wanted, terms, "wgrad")
        self.start_of_step()

    def forward(
        self, layer: Any, recipe: Any, x: Tensor, y: Tensor
    ) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]] | None:
        """Check a forward; return what checks the gradients of its output and of its input, in this order.

        Of an input that is quantized already no amax is collected; its products are left out.
        """
        past = self.past.setdefault(layer, {kind: Past() for kind in ("input", "grad_output")})
        if layer.training or layer not in self.recipes:
            # an evaluation changes no rule, also not that of a layer which was given one
            kept = layer.delayed_slots()
            self.recipes[layer] = rule = kept[0].recipe if kept and not layer.training else recipe
            for one in past.values():
                one.fit(rule.amax_history_len)
        if layer.scale is None:
            return None
        found = {"input": layer.scale[0].item(), "weight": 0.0, "grad_output": layer.scale[2].item()}
        for kind, one in past.items():
            if not self.changed and not abs(one.scale - found[kind]) <= _ROUNDED * one.scale:
                raise Difference(
                    f"scale of {kind}: {found[kind]:.6g}, the steps before make it {one.scale:.6g}"
                )
        read, collects = Read(recipe, found), layer.training or torch.is_grad_enabled()
        if isinstance(x, nc.QuantizedTensor):
            self.partly.add(layer)
            return (past["grad_output"].collect if collects else lambda dy: None), lambda dx: None
        operands = {
            "input": x.detach().reshape(-1, x.shape[-1]).clone(),
            "weight": layer.weight.detach().clone(),
        }
        if collects:
            past["input"].collect(operands["input"])
        decoded = {kind: read.cast(operand, kind) for kind, operand in operands.items()}
        bias = layer.bias.detach().double() if layer.bias is not None else 0.0
        wanted = decoded["input"] @ decoded["weight"].t()
        found = y.detach().reshape(-1, y.shape[-1])
        _check(found, wanted + bias, _terms(decoded["input"], decoded["weight"].t()), "a product")
        if not y.requires_grad:
            return None
        input_grads: list[tuple[Tensor, float]] = []

        def seen_output(dy: Tensor) -> None:
            flat = dy.detach().reshape(-1, dy.shape[-1])
            cast = read.cast(flat, "grad_output")
            if collects:
                past["grad_output"].collect(flat)
            grad, terms = self.weight_grads.get(layer, (0.0, 0.0))
            self.weight_grads[layer] = (
                grad + cast.t() @ decoded["input"],
                terms + _terms(cast.t(), decoded["input"]),
            )
            input_grads.append((cast @ decoded["weight"], _terms(cast, decoded["weight"])))

        def seen_input(dx: Tensor) -> None:
            if input_grads:
                _check(dx.detach().reshape(-1, dx.shape[-1]), *input_grads[-1], "dgrad")

        return seen_output, seen_input


def _amax(operand: Tensor) -> float:
    """Return max|x|; NaN is passed over, as in casts."""
    if not operand.numel():
        return 0.0
    return operand.abs().nan_to_num(nan=0.0, posinf=math.inf).max().item()


def _scale_of(recipe: Any, kind: str, amax: float, otherwise: float) -> float:
    if not 0.0 < amax < math.inf:
        return otherwise
    largest = (57344.0 if kind == "grad_output" else 448.0) / 2 ** (recipe.margin if kind != "weight" else 0)
    quotient = torch.tensor(largest) / torch.tensor(amax)
    return min(quotient.item(), torch.finfo(torch.float32).max)


def _terms(a: Tensor, b: Tensor) -> float:
    """Return the root of the sum of a product's squared terms, which bounds what sums in another order differ by."""
    return float((a.square() @ b.square()).sum().sqrt()) if a.numel() and b.numel() else 0.0


def _check(found: Tensor, wanted: Tensor, terms: float, what: str) -> None:
    size = max(float(wanted.norm()), terms)
    if not 1e-20 < size < torch.finfo(torch.float32).max / 4 or not found.isfinite().all():
        return
    # tensor cores of a GPU add products of FP8 with fewer bits than fp32 has
    tolerance = 0.02 if found.dtype == torch.bfloat16 else 2e-3 if found.is_cuda else 1e-4
    error = float((found.double() - wanted).norm()) / size
    if not error <= tolerance:
        raise Difference(f"{what} of operands with the scales of its forward: off by {error:.3g}")
