"""The kernel of Adam against the reference, byte for byte, and the reference against PyTorch's."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor, nn

from narrowcast import kernels
from narrowcast import reference as reference_numerics
from narrowcast.quantizers import (
    DelayedFloat8Quantizer,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
)
from narrowcast.reference import adam as reference
from narrowcast.reference import log_codes
from narrowcast.testing import assert_close

from .checks import DTYPES

BF16, FP16, FP32 = DTYPES
U8 = torch.uint8
# Sizes that 16 divides go eight to a launch.
SHAPES = [
    (1,),
    (17,),
    (5, 129),
    (1024,),
    (3, 1000),
    (0, 4),
    (16,),
    (2, 24),
    (4096,),
    *((5, 16 * k) for k in range(1, 6)),
]
OPTIONS: dict[str, Any] = {
    "lr": 3e-3,
    "count": 3,
    "inv_scale": None,
    "found_inf": None,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": True,
    "bias_correction": True,
}


def state(
    dtypes: tuple[torch.dtype, ...], beside: torch.dtype | None, seed: int = 0, shapes: Any = SHAPES
) -> list[list[Tensor]]:
    """Weights, gradients, both moments, what stands beside, and ranges of moments in uint8."""
    generator = torch.Generator().manual_seed(seed)
    columns: list[list[Tensor]] = [[], [], [], [], [], []]
    for shape in shapes:
        w, g, m, v = (torch.randn(shape, generator=generator) for _ in range(4))
        g = g * torch.exp2(torch.randint(-30, 3, shape, generator=generator).float())
        if len(shape) == 1 and shape[0] > 100:  # not a gradient of numbers, and none at all
            g[::7], g[1::7], g[2::7] = math.nan, math.inf, 0.0
            m[2::7], v[2::7] = 0.0, 0.0
        ranges = []
        for column, x, dtype in zip(columns, (w, g, 0.1 * m, v * v), dtypes):
            if dtype == torch.uint8:
                x, own = log_codes.encode(x)
                ranges.append(own)
            column.append(x.to(dtype))
        if ranges:
            columns[5].append(torch.stack(ranges))
        if beside is torch.int16:
            columns[4].append(torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16))
        elif beside is not None:
            columns[4].append(torch.zeros(shape, dtype=beside))
    return columns


def compare(columns: list[list[Tensor]], device: torch.device, **changed: Any) -> list[list[Tensor]]:
    """One step by both, in place on copies; what the reference made."""
    options = {**OPTIONS, **changed}
    moved = [[x.to(device, copy=True) for x in column] for column in columns]
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    reference.step(*columns, **options)
    kernels.adam.step(*moved, **there)
    for name, made, expected in zip(
        ("weight", "grad", "first", "second", "beside", "ranges"), moved, columns
    ):
        for ours, theirs in zip(made, expected, strict=True):
            assert_bitwise(ours, theirs, f"{name} {tuple(theirs.shape)}")
    return columns


MIXED = [
    ((BF16, BF16, BF16, BF16), None),
    ((FP32, FP32, FP32, FP32), None),
    ((FP16, FP32, BF16, FP32), None),
    ((FP32, BF16, FP32, FP32), BF16),
    ((FP32, FP16, BF16, BF16), FP16),
    ((FP32, FP32, FP32, FP32), FP32),
    ((BF16, BF16, FP32, FP32), torch.int16),
    ((BF16, FP32, BF16, BF16), torch.int16),
    ((BF16, BF16, U8, U8), torch.int16),
    ((FP32, BF16, U8, FP32), BF16),
    ((BF16, FP32, BF16, U8), None),
]
ALL = [
    *((mix, None) for mix in itertools.product(DTYPES, DTYPES, (FP32, BF16), (FP32, BF16))),
    *(
        ((FP32, *mix), beside)
        for mix in itertools.product(DTYPES, (FP32, BF16), (FP32, BF16))
        for beside in DTYPES
    ),
]


@pytest.mark.parametrize("dtypes, beside", MIXED)
def test_dtypes(dtypes: tuple[torch.dtype, ...], beside: torch.dtype | None, device: torch.device) -> None:
    compare(state(dtypes, beside), device)


@pytest.mark.requested
@pytest.mark.parametrize("dtypes, beside", ALL)
def test_all_dtypes(
    dtypes: tuple[torch.dtype, ...], beside: torch.dtype | None, device: torch.device
) -> None:
    compare(state(dtypes, beside), device)


@pytest.mark.parametrize(
    "changed",
    [
        {"decoupled": False, "count": 1},
        {"weight_decay": 0.0, "bias_correction": False},
        {"lr": torch.tensor(1e-3), "count": torch.tensor(100_000.0), "betas": (0.9, 0.999)},
        {"count": torch.tensor([7], dtype=torch.int32), "inv_scale": torch.tensor([1 / 3])},
        {"found_inf": torch.tensor([1], dtype=torch.int32), "inv_scale": torch.tensor(0.5), "eps": 0.0},
        {"found_inf": torch.tensor(0.0), "eps": 0.0, "betas": (0.0, 0.0)},
    ],
)
def test_options(changed: dict[str, Any], device: torch.device) -> None:
    before = state((FP32,) * 4, None, 1)
    after = compare(state((FP32,) * 4, None, 1), device, **changed)
    stopped = bool(changed.get("found_inf", torch.tensor(0)))
    assert torch.equal(after[0][0], before[0][0]) == stopped


@pytest.mark.parametrize("dtypes, beside", [MIXED[0], MIXED[2], MIXED[5], MIXED[10]])
def test_weights_rounded_at_random(
    dtypes: tuple[torch.dtype, ...], beside: torch.dtype | None, device: torch.device
) -> None:
    compare(state(dtypes, beside), device, stochastic=True, count=70000)


def test_the_mean_of_weights_rounded_at_random_is_the_value() -> None:
    x = torch.randn(400) * 1.7
    x[:3] = torch.tensor([math.inf, math.nan, 0.0])
    rounded = torch.stack([reference.round_at_random(x, count).float() for count in range(1, 901)])
    up = x.bfloat16().float()
    assert torch.equal(rounded[:, 0], torch.full((900,), math.inf)) and rounded[:, 1].isnan().all()
    assert not rounded[:, 2].any() and torch.equal(reference.round_at_random(up, 5)[3:].float(), up[3:])
    distance = (rounded - x)[:, 3:].abs() / x[3:].abs()
    assert distance.max() < 2.0**-7
    # 900 draws of a step of at most 2**-7: a deviation of 2**-7 / 2 / 30 at most
    assert ((rounded.double().mean(0) - x).abs() / x.abs())[3:].max() < 4.5 * 2.0**-8 / 30
    neighbors = (rounded[:, 4:] > x[4:]).float()
    assert neighbors[:, :-1].T.corrcoef()[0, 1:].abs().nanmean() < 0.05


def test_other_strides_and_dtypes(device: torch.device) -> None:
    columns = state((FP32,) * 4, None)
    for column in columns[:4]:
        column[2] = column[2].t().contiguous().t()
    columns[1][4] = columns[1][4][:, :1].expand(3, 1000)
    for column in columns:
        del column[3:4]
    compare(columns, device)
    with pytest.raises(ValueError, match="cannot step torch.float64"):
        kernels.adam.step(
            *([torch.ones(3, dtype=torch.float64, device=device)] for _ in range(4)), [], **OPTIONS
        )


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_reference_is_torchs(decoupled: bool) -> None:
    weights, *_ = state((FP32,) * 4, None)
    twins = [nn.Parameter(w.clone()) for w in weights]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = kind(twins, **options)
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for count in range(1, 6):
        grads = [torch.randn(w.shape) for w in weights]
        for twin, grad in zip(twins, grads):
            twin.grad = grad
        optimizer.step()
        reference.step(
            weights,
            grads,
            first,
            second,
            [],
            **{**OPTIONS, **options, "count": count, "decoupled": decoupled},
        )
    for weight, twin, v in zip(weights, twins, second):
        if weight.numel():
            assert_close(weight, twin.detach(), "fp32_sum_order")
            assert_close(v, optimizer.state[twin]["exp_avg_sq"], "fp32_sum_order")


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.95, 0.999, 0.99999])
def test_corrections_are_exact_to_a_few_units(beta: float) -> None:
    for count in (1, 2, 3, 10, 1000, 12345, 10**6):
        exact = -math.expm1(count * math.log(beta)) if beta else 1.0
        assert abs(reference.correction(1 - beta, count).item() / exact - 1) < 2**-20


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from narrowcast.kernels.adam import _adam_factors_kernel, _adam_step_kernel

def compiled(kernel, constants, **types):
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr") | types
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

flags = dict(STORED_LR=False, STORED_COUNT=False, CORRECTED=True)
numbers = dict.fromkeys(("lr", "beta1", "missing1", "beta2", "missing2", "eps", "decay"), "fp64")
texts = [compiled(_adam_factors_kernel, flags, factors_ptr="*fp32", **numbers)]
flags = dict(BESIDE=0, DECAY=2, SCALED=False, STOPPABLE=False, WIDE=False, GROUP=128, BLOCK=1024)
for coded, kinds in ((False, "*bf16"), (True, "*u8")):
    tensors = dict.fromkeys(("factors_ptr", "inv_scale_ptr", "found_inf_ptr"), "*fp32")
    for letter, kind in dict(w="*bf16", g="*bf16", m=kinds, v=kinds, b="*bf16", r="*fp32").items():
        tensors |= {f"{letter}{i}": kind for i in range(8)}
    flags |= dict(FIRST=coded, SECOND=coded)
    texts.append(compiled(_adam_step_kernel, flags, **tensors))
assert "mul.rn.sat.f32" in texts[-1]
for text in texts:
    assert not any(f"{operation}.f64" in text for operation in ("add", "sub", "mul", "fma", "div", "sqrt"))
"""


def test_numbers_of_a_compiled_graph_are_fp32_before_they_are_used() -> None:
    """Inductor hands them over as fp64; compiled for a GPU in a process that does not interpret."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


QUANTIZERS = {
    "delayed": DelayedFloat8Quantizer(torch.float8_e4m3fn, 1),
    "current": Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
    "tiles": Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True, block_scaling_dim=2),
    "rows": MXFP8Quantizer(torch.float8_e4m3fn),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtypes, beside", [MIXED[0], MIXED[3], MIXED[6], MIXED[7]])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_codes_of_the_same_pass(
    kind: str, dtypes: tuple[torch.dtype, ...], beside: torch.dtype | None, device: torch.device
) -> None:
    """The codes are those of the stepped parameter, and everything else is as without them."""
    shapes = [(128, 256)] if kind == "rows" else [(64, 128), (130, 72), (257, 300)]
    state_of_delayed = torch.tensor([1.0, 32.0]), torch.tensor([0.0, 0.5])
    shares = {name: OPTIONS[name] for name in ("betas", "weight_decay", "decoupled")}
    rates = [OPTIONS[name] for name in ("lr", "count", "betas", "eps", "weight_decay", "bias_correction")]
    for number, shape in enumerate(shapes):
        columns = state(dtypes, beside, number, [shape])
        moved = [[x.to(device, copy=True) for x in column] for column in columns]
        made = []
        for numerics, ((w,), (g,), (m,), (v,), besides, _), where in (
            (reference_numerics, columns, torch.device("cpu")),
            (kernels, moved, device),
        ):
            scale, amax = (x.to(where, copy=True) for x in state_of_delayed)
            factors = numerics.adam.factors(*rates, where)
            x = numerics.adam.source(w, g, m, v, next(iter(besides), None), factors, **shares)
            quantizer = QUANTIZERS[kind]
            if kind == "delayed":
                made.append([*quantizer._encode_scaled(numerics, x, scale, amax), amax])
            else:
                made.append(quantizer._encode(numerics, x, None))
        for ours, theirs in zip(made[1], made[0], strict=True):
            assert_bitwise(ours, theirs, f"codes {shape}")
        for ours, theirs in zip(moved[:5], columns[:5], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert_bitwise(one, other, f"state {shape}")
