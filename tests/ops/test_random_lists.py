"""Property: a random list of operations gives the same fused, unfused, and written in plain PyTorch.

Twenty lengths; the seed of each is its length. Under a recipe the plain composition quantizes with ``nc.Linear``. In
fp32 all three agree but for the order of sums; in bf16 they round at different places.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import step
from ops_checks import make_inputs, unfused
from recipes import DEVICE, QUANTIZED
from torch import Tensor

import narrowcast as nc
from narrowcast import ops
from narrowcast.ops.fuser import OperationFuser
from narrowcast.testing import TOLERANCES, relative_error

LENGTHS = range(1, 21)
# in bf16 a GEMM rounds once less where it adds the bias itself, in fp32 at most the order of its sums changes
SAME = 1e-6 if DEVICE == "cpu" else TOLERANCES["fp8_flips"].relative
WIDTHS = (32, 64, 96)
TOKENS = (4, 10)


@dataclass
class Run:
    """What a plain composition carries along besides its main tensor."""

    extras: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    skips: dict[str, Tensor] = field(default_factory=dict)


Plain = Callable[[Tensor, Run], Tensor]


class Drawing:
    """A random list: operations, the plain composition of each, and the shapes of the caller's tensors."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self.random = random.Random(length)
        self.place: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
        self.width, self.lead = self.random.choice(WIDTHS), TOKENS
        self.ops: list[Any] = []
        self.plain: list[Plain] = []
        self.shapes = [(*self.lead, self.width)]
        self.open: list[tuple[str, tuple[int, ...]]] = []  # channels and the shapes in them
        torch.manual_seed(length)
        singles = [
            self.activation,
            self.gated,
            self.norm,
            self.scale,
            self.reshape,
            self.begin,
            self.end,
            self.extra,
        ]
        phrases = [
            [self.linear, self.bias, self.activation],
            [self.linear, self.scale, self.extra],
            [self.linear, self.bias, self.extra],
            [self.begin, self.norm, self.linear],
            [self.begin, self.linear, self.bias, self.end],
            [self.norm, self.linear, self.gated, self.linear],
        ]
        while len(self.ops) < length:
            for draw in self.random.choice([*phrases, [self.random.choice(singles)]]):
                if len(self.ops) < length:
                    draw()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.width)

    def add(self, op: Any, plain: Plain) -> None:
        for parameter in op.parameters():
            if parameter.dim() == 1:  # norms and biases that are not 1 and 0
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        self.ops.append(op)
        self.plain.append(plain)

    def linear(self) -> None:
        out = self.random.choice(WIDTHS)
        op = ops.BasicLinear(self.width, out, **self.place)
        self.width = out
        self.add(op, lambda x, run: plain_linear(x, op.weight))

    def bias(self) -> None:
        op = ops.Bias(self.width, **self.place)
        self.add(op, lambda x, run: x + op.bias)

    def activation(self) -> None:
        op, plain = self.random.choice(
            [
                (ops.GELU(), lambda x, run: F.gelu(x, approximate="tanh")),
                (ops.ReLU(), lambda x, run: F.relu(x)),
                (ops.SiLU(), lambda x, run: F.silu(x)),
            ]
        )
        self.add(op, plain)

    def gated(self) -> None:
        if self.width < 64:
            return
        self.width //= 2
        op, act = self.random.choice(
            [(ops.SwiGLU(), F.silu), (ops.ReGLU(), F.relu), (ops.GLU(), torch.sigmoid)]
        )

        def plain(x: Tensor, run: Run) -> Tensor:
            gate, value = x.chunk(2, dim=-1)
            return act(gate) * value

        self.add(op, plain)

    def norm(self) -> None:
        size = (self.width,)
        if self.random.random() < 0.5:
            rms = ops.RMSNorm(self.width, **self.place)
            self.add(rms, lambda x, run: F.rms_norm(x, size, rms.weight, 1e-5))
        else:
            layer = ops.LayerNorm(self.width, **self.place)
            self.add(layer, lambda x, run: F.layer_norm(x, size, layer.weight, layer.bias, 1e-5))

    def scale(self) -> None:
        factor = self.random.choice([0.5, 1.3])
        self.add(ops.ConstantScale(factor), lambda x, run: x * factor)

    def reshape(self) -> None:
        self.lead = (TOKENS[0] * TOKENS[1],) if len(self.lead) == 2 else TOKENS
        shape = (-1, self.width) if len(self.lead) == 1 else (*TOKENS, -1)
        self.add(ops.Reshape(shape), lambda x, run: x.reshape(shape))

    def begin(self) -> None:
        op, name = ops.MakeExtraOutput(in_place=self.random.random() < 0.5), f"skip{len(self.ops)}"
        to_caller = self.random.random() < 0.3
        op.set_extra_output_channel(0, name, output_to_caller=to_caller)
        self.open.append((name, self.shape))

        def plain(x: Tensor, run: Run) -> Tensor:
            run.skips[name] = x
            if to_caller:
                run.outputs.append(x)
            return x

        self.add(op, plain)

    def end(self) -> None:
        fitting = [name for name, shape in self.open if shape == self.shape]
        if not fitting:
            return
        op, name = ops.AddExtraInput(in_place=self.random.random() < 0.7), self.random.choice(fitting)
        op.set_extra_input_channel(0, name)
        self.add(op, lambda x, run: x + run.skips[name])

    def extra(self) -> None:
        self.shapes.append(self.shape)
        op = ops.AddExtraInput(in_place=self.random.random() < 0.7)
        self.add(op, lambda x, run: x + run.extras.pop(0))

    def run_plain(self, x: Tensor, *extras: Tensor) -> Any:
        run = Run(list(extras))
        for plain in self.plain:
            x = plain(x, run)
        return (x, *run.outputs) if run.outputs else x


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    layer = nc.Linear(weight.shape[1], weight.shape[0], bias=False, params_dtype=weight.dtype, device=DEVICE)
    return torch.func.functional_call(layer, {"weight": weight}, (x,))


def three_ways(length: int, dtype: torch.dtype, recipe: Any) -> list[dict[str, Tensor]]:
    """(fused, unfused, plain)."""
    drawn = Drawing(length, dtype)
    block, inputs = ops.Sequential(*drawn.ops), make_inputs(drawn.shapes, dtype=dtype, seed=length)
    fused = step(block, inputs, recipe)
    with unfused():
        alone = step(block, inputs, recipe)
    return [fused, alone, step(block, inputs, recipe, drawn.run_plain)]


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], largest: float) -> None:
    assert ours.keys() == theirs.keys() and "out0" in ours
    for name, one in ours.items():
        assert one.shape == theirs[name].shape and one.dtype == theirs[name].dtype, name
        error = relative_error(one, theirs[name])
        assert error <= largest, f"{name} differs by {error:.2e}"


# Stateless ones that round to nearest: their quantizers see what those of the plain composition see.
RECIPES = [QUANTIZED[name] for name in ("current", "mxfp8", "block", "custom")]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("quantized", [False, True])
def test_the_same_in_fp32(quantized: bool, length: int) -> None:
    recipe = RECIPES[length % len(RECIPES)] if quantized else None
    fused, alone, plain = three_ways(length, torch.float32, recipe)
    assert_near(fused, alone, SAME)
    assert_near(fused, plain, TOLERANCES["fp8_flips"].relative if quantized else 1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_noise_in_bf16(length: int) -> None:
    """An ulp of bf16 flips FP8 roundings, layer after layer; but fused is as near to high precision as unfused is."""
    ways = three_ways(length, torch.bfloat16, RECIPES[length % len(RECIPES)])
    precise = three_ways(length, torch.bfloat16, None)[2]
    for name, expected in precise.items():
        fused, alone, plain = (relative_error(way[name], expected) for way in ways)
        assert fused < 0.5, f"{name}: {fused:.3f}"
        assert fused <= 1.3 * max(alone, plain) + 0.005, (
            f"{name}: {fused:.3f} fused, {alone:.3f}, {plain:.3f}"
        )


def test_the_lists_reach_the_fused_operations() -> None:
    """Else the property would say nothing."""
    found: set[str] = set()
    for length in LENGTHS:
        made = OperationFuser(Drawing(length, torch.bfloat16).ops).fused(RECIPES[0])
        found |= {type(op).__name__ for op, where in (*made.forward, *made.backward) if len(where) > 1}
    assert found >= {
        "ForwardLinearBiasAdd",
        "ForwardLinearBiasActivation",
        "ForwardLinearScaleAdd",
        "BackwardLinearAdd",
        "BackwardLinearScale",
        "BackwardActivationBias",
        "BackwardAddRMSNorm",
    }
