"""Delayed scaling to the rounding: the scales a forward must read, and its products of operands cast with these.

The scales follow from the amaxes that the calls before have shown, by the rule of docs/concepts.md. It is written out
here: a model that knows neither buffers nor who renews.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .programs import Difference

OPERANDS = ("input", "weight", "grad_output")
_ROUNDED = 1e-5


class Past:
    """What the calls of a layer have shown of one operand: of which a renewal has made a scale, and since then.

    ``rule``: of that renewal; None before the first one. ``amax``: what its scale follows from.
    """

    def __init__(self) -> None:
        self.rows = [0.0]
        self.renewals = 0
        self.pending = self.amax = 0.0
        self.rule: Any = None

    def collect(self, operand: Tensor) -> None:
        self.pending = max(self.pending, _amax(operand))

    def renew(self, recipe: Any) -> None:
        """Begin a forward in training, by the recipe in force there."""
        length = recipe.amax_history_len
        self.rows = (self.rows + length * [0.0])[:length]
        if self.pending:
            recent = recipe.amax_compute_algo == "most_recent"
            self.rule, self.amax = recipe, self.pending if recent else max(self.pending, *self.rows)
            self.rows = [0.0, *self.rows[2:], self.pending][:length]
            self.renewals += 1
        self.pending = 0.0


class Read(NamedTuple):
    """The scales of one forward, and the recipe."""

    recipe: Any
    scales: dict[str, float]

    def cast(self, operand: Tensor, kind: str) -> Tensor:
        """Return what the operand is after a cast to FP8, decoded, fp64."""
        e5m2 = kind == "grad_output"
        largest = 57344.0 if e5m2 else 448.0
        # 0: nothing was seen, and the scale is that of the operand's own amax
        scale = self.scales[kind] or _scale_of(self.recipe, kind, _amax(operand), 1.0)
        scaled = operand.float() * torch.tensor(scale)
        codes = scaled.clamp(-largest, largest).to(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
        return codes.double() / scale


class Exact:
    """What every ``Linear`` under delayed scaling must have read, and what follows from it.

    Args:
        steps_at_each_forward: whether each training forward of a layer begins a step, by the rule in force there. It
            does not where a layer runs twice in the model's forward, or an autocast has several forwards, nor by that
            rule where the model renews for a layer in evaluation: there the scales are taken as they are.
        one_recipe: whether no layer has a recipe of its own, beside that of all: first scales may follow from either.
    """

    def __init__(self, steps_at_each_forward: bool, one_recipe: bool) -> None:
        self.knows_steps, self.knows_first = steps_at_each_forward, one_recipe
        self.past: dict[Any, dict[str, Past]] = {}
        self.weight_grads: dict[Any, tuple[Tensor, float]] = {}
        self.partly: set[Any] = set()
        self.changed = False

    def forget(self) -> None:
        """Another recipe is in force."""
        self.past, self.changed = {}, True

    def pass_over(self, layer: Any) -> None:
        """Leave out a call, and with it the layer's weight gradient of this step."""
        self.partly.add(layer)

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
        """Check a forward; return what checks the gradients of its output and of its input, in this order."""
        past = self.past.setdefault(layer, {kind: Past() for kind in (*OPERANDS, "begun weight")})
        if layer.training:
            for one in past.values():
                one.renew(recipe)
            if past["input"].rule is past["grad_output"].rule is None:
                # decided: a layer whose inputs and gradients were zeros, or had no rows, has not begun
                past["begun weight"] = Past()
        operands = {
            "input": x.detach().reshape(-1, x.shape[-1]).clone(),
            "weight": layer.weight.detach().clone(),
        }
        read = self._read(layer, recipe, past, operands["weight"], bool(y.requires_grad))
        if read is None:
            return None
        decoded = {kind: read.cast(operand, kind) for kind, operand in operands.items()}
        bias = layer.bias.detach().double() if layer.bias is not None else 0.0
        wanted = decoded["input"] @ decoded["weight"].t()
        found = y.detach().reshape(-1, y.shape[-1])
        _check(found, wanted + bias, _terms(decoded["input"], decoded["weight"].t()), "a product")
        if not y.requires_grad:
            return None
        collects = layer.training
        if collects:
            past["input"].collect(operands["input"])
            for kind in ("weight", "begun weight"):
                past[kind].collect(operands["weight"])
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

    def _read(
        self, layer: Any, recipe: Any, past: dict[str, Past], weight: Tensor, recorded: bool
    ) -> Read | None:
        """Return the scales that the layer's forward has read; None if the layer keeps none.

        Raises:
            Difference: they are not those that follow from the calls before.
        """
        if layer.scale_fwd is None or layer.scale_bwd is None:
            return None
        found = {
            "input": layer.scale_fwd[0].item(),
            "weight": layer.scale_fwd[1].item(),
            "grad_output": layer.scale_bwd[0].item(),
        }
        if not layer.training:
            found["weight"] = _scale_of(recipe, "weight", _amax(weight), found["weight"])
        if self.knows_steps and layer.training and recorded:
            for kind in OPERANDS:
                if kind == "weight":
                    # decided: a root renews before its layers forget what they have collected until they begin
                    with contextlib.suppress(Difference):
                        self._check_scale(layer, recipe, kind, found[kind], past["begun weight"], weight)
                        continue
                self._check_scale(layer, recipe, kind, found[kind], past[kind], weight)
        return Read(recipe, found)

    def _check_scale(
        self, layer: Any, recipe: Any, kind: str, found: float, past: Past, weight: Tensor
    ) -> None:
        if past.rule is not None:
            length = 1 if past.rule.amax_compute_algo == "most_recent" else past.rule.amax_history_len
            if self.changed and past.renewals < length:
                return  # amaxes of the recipe before are among them
            wanted = _scale_of(past.rule, kind, past.amax, found)
        elif self.changed or not self.knows_first:
            return
        else:
            wanted = _scale_of(recipe, kind, _amax(weight), found) if kind == "weight" else 0.0
        if not abs(wanted - found) <= _FIRST_ROUNDING[past.rule is not None] * wanted:
            raise Difference(f"scale of {kind}: {found:.6g}, the calls before make it {wanted:.6g}")


# A weight that was only rounded since keeps its first scale.
_FIRST_ROUNDING = {False: 2**-7, True: _ROUNDED}


def _amax(operand: Tensor) -> float:
    """Return max|x|; NaN is passed over, as in casts."""
    if not operand.numel():
        return 0.0
    return operand.abs().nan_to_num(nan=0.0, posinf=math.inf).max().item()


def _scale_of(recipe: Any, kind: str, amax: float, otherwise: float) -> float:
    if not 0.0 < amax < math.inf:
        return otherwise
    largest = (57344.0 if kind == "grad_output" else 448.0) / 2**recipe.margin
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
