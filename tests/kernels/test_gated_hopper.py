"""The kernel of gated activations that is for Hopper alone: the bytes of the reference, and that Triton compiles it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E4M3, E5M2
from narrowcast.kernels import launch

from .checks import make

GLUON = "triton.experimental.gluon.language"
BLOCKS = {"block_dim": 1, "power_2": True, "rowwise": True, "columnwise": True}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu", "geglu"])
@pytest.mark.parametrize("shape", [(128, 256), (2, 192, 1280), (1152, 2048), (130, 256)], ids=str)
def test_tiles_wait_in_shared_memory(
    shape: tuple[int, ...], name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any dtype and format; rows that fill no tile are the general kernel's."""
    used = []

    def recorded(name: str, on: torch.device) -> object:
        used.append(launch.for_hopper(name, on))
        return used[-1]

    monkeypatch.setattr(kernels.float8_block, "for_hopper", recorded)
    half = (*shape[:-1], shape[-1] // 2)
    for dtype, kind, fmt, epsilon in (
        (torch.bfloat16, "special", E4M3, 0.0),
        (torch.float16, "normal", E5M2, 0.25),
        (torch.bfloat16, "wide", E4M3, 0.0),
    ):
        x, grad = make(kind, shape, dtype), make("normal", half, dtype, 1)

        def both(numerics, on: torch.device, x=x, grad=grad, fmt=fmt, epsilon=epsilon) -> list[Tensor]:
            forward = numerics.fused_producers.activation(x.to(on), name)
            backward = numerics.fused_producers.activation_backward(
                grad.to(on), x.to(on), name, column_sums=True
            )
            results = [
                numerics.float8_block.quantize(y, fmt, epsilon=epsilon, **BLOCKS) for y in (forward, backward)
            ]
            return [*results[0], *results[1], numerics.fused_producers.column_sum(backward)]

        expected = both(reference, torch.device("cpu"))
        for index, (a, b) in enumerate(zip(both(kernels, device), expected, strict=True)):
            assert_bitwise(a, b, f"{name} {shape} {dtype} {kind} buffer {index}")
    assert any(used) == (torch.cuda.get_device_capability(device)[0] == 9)


def test_takes_whole_tiles_of_what_it_does_sooner() -> None:
    pytest.importorskip(GLUON, reason="needs Gluon")
    from narrowcast.kernels import gated_hopper as hopper

    def takes(
        kind: str, sums: bool, rows: int = 256, width: int = 256, dtype=torch.bfloat16, **other
    ) -> bool:
        constants = (kind, "swiglu", 0.0, 0.0, 0.0)
        options = {"fmt": "e4m3", "epsilon": 0.0, **BLOCKS, **other}
        return hopper.launch((rows, width), dtype, constants, sums, **options) is not None

    assert takes("gated", False) and takes("gated_backward", True) and not takes("gated_backward", False)
    assert not takes("gated", False, rows=192) and not takes("gated", False, width=192)
    assert not takes("gated_backward", True, width=128) and not takes("gated", False, rows=0)
    assert not takes("gated", False, dtype=torch.float32) and not takes("gated", False, block_dim=2)
    assert not takes("gated", False, power_2=False) and not takes("gated", False, columnwise=False)


COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from narrowcast.kernels import gated_hopper as hopper
kernel = hopper._gated_hopper_kernel
constants = dict(GRADIENT=True, FUNCTION=sys.argv[1], P0=1.5, P1=1.5, P2=0.5, E5M2=False, FP8_MAX=448.0,
                 OVERFLOW=3.38e38, EPSILON=False)
pointers = dict.fromkeys(("row_scale_ptr", "column_scale_ptr", "sums_ptr"), "*fp32")
pointers |= dict(x_ptr="*bf16", grad_ptr="*bf16", data_ptr="*u8", transpose_ptr="*u8", epsilon="fp32")
signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr") | pointers
aligned = ("x_ptr", "grad_ptr", "data_ptr", "transpose_ptr", "M", "F")
constants, attributes = (
    {(kernel.arg_names.index(name),): value for name, value in given.items()}
    for given in (constants, dict.fromkeys(aligned, [["tt.divisibility", 16]]))
)
source = GluonASTSource(kernel, signature, constants, attributes)
options = dict(num_warps=hopper.WARPS, enable_fp_fusion=False)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert compiled.metadata.shared <= 232448 // 3, compiled.metadata.shared  # three programs at once
"""


@pytest.mark.parametrize("function", ["swiglu", "clamped_swiglu", "situ_glu"])
def test_compiles_without_a_gpu(function: str) -> None:
    """Its language is Triton's experimental one: what changes there is seen here."""
    pytest.importorskip(GLUON, reason="needs Gluon")
    # in a process of its own, for the interpreter leaves its marks on Triton's functions
    command = [sys.executable, "-c", COMPILED, function]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
