"""Activation kernels and the rounding they end with, against the reference."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh, awkward_layouts

from narrowcast import kernels
from narrowcast.reference import activation as reference
from narrowcast.reference import reduction, scaling

from .checks import DTYPES, KINDS, SHAPES, compare, grid, make

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from narrowcast.kernels.activation import sigmoid
    from narrowcast.kernels.codecs import round_to_dtype

    @triton.jit
    def round_kernel(x_ptr, y_ptr, N: tl.constexpr):
        index = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(y_ptr + index, round_to_dtype(tl.load(x_ptr + index), y_ptr.dtype.element_ty))

    @triton.jit
    def sigmoid_kernel(x_ptr, y_ptr, N: tl.constexpr):
        index = tl.program_id(0) * N + tl.arange(0, N)
        y = sigmoid(tl.load(x_ptr + index))
        tl.store(y_ptr + index, round_to_dtype(y, tl.float32))


INTERPRETED_SHAPES = [(2,), (1, 2), (7, 6), (3, 130), (2, 2050), (2, 3, 10), (0, 4), (4, 0)]
PARAMS = {"limit": 0.75, "alpha": 1.3, "glu_linear_offset": 0.25}


def check(shape, kind, dtype, device, name: str, **params: float) -> None:
    x = make(kind, shape, dtype)
    compare(
        lambda x: [kernels.activation.forward(x, name, **params)],
        lambda x: [reference.forward(x, name, **params)],
        x,
        device,
        f"{name} {kind}",
    )
    width = shape[-1] // 2 if reference.ACTIVATIONS[name].gated else shape[-1]
    grad = make(kind, (*shape[:-1], width), dtype, seed=1)
    compare(
        lambda x: [kernels.activation.backward(grad.to(device), x, name, **params)],
        lambda x: [reference.backward(grad, x, name, **params)],
        x,
        device,
        f"gradient of {name} {kind}",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_limit_keep_their_gradient(dtype, device) -> None:
    x = torch.tensor([[7.0, -7.0, 7.0, 1.0, 7.0, -7.0, -7.0, 7.0]], dtype=dtype)  # gates, then values
    grad = torch.ones(1, 4, dtype=dtype)
    dx = kernels.activation.backward(grad.to(device), x.to(device), "clamped_swiglu").cpu()
    assert_bitwise(dx, reference.backward(grad, x, "clamped_swiglu"))
    assert dx.count_nonzero() == 8


def patterns() -> torch.Tensor:
    """fp32 of all exponents with random mantissas, and the neighbours of the midpoints of bf16 and of fp16."""
    edges = torch.arange(-(2**31), 2**31, 2**12 if torch.cuda.is_available() else 2**19, dtype=torch.int64)
    bits = torch.cat([edges, *(edges + middle + shift for middle in (2**12, 2**15) for shift in (-1, 0, 1))])
    bits = torch.cat([bits, torch.randint(-(2**31), 2**31, bits.shape)])
    return bits[: bits.numel() // 1024 * 1024].clamp(-(2**31), 2**31 - 1).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("width", [130, 4096])
def test_amax(width: int, device: torch.device) -> None:
    """Of the result and of a gradient that is not written, in blocks of either size."""
    x, grad = (
        make("special", (3, width), torch.bfloat16),
        make("normal", (3, width // 2), torch.bfloat16, seed=1),
    )
    slots = kernels.activation.amax_slots(x.to(device))
    y = kernels.activation.forward(x.to(device), "swiglu", slots)
    assert_bitwise(y, reference.forward(x, "swiglu"))
    assert_bitwise(slots.amax().reshape(1), scaling.amax(y.cpu()))
    slots = kernels.activation.backward_amax(grad.to(device), x.to(device), "swiglu", (0.0, 0.0, 0.0))
    assert_bitwise(slots.amax().reshape(1), scaling.amax(reference.backward(grad, x, "swiglu")))


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_dtype(dtype: torch.dtype, device: torch.device) -> None:
    x = patterns()
    y = torch.empty(x.shape, dtype=dtype, device=device)
    round_kernel[(x.numel() // 1024,)](x.to(device), y, 1024, enable_fp_fusion=False)
    assert_bitwise(y, reduction.round_to_dtype(x, dtype))


def test_sigmoid(device: torch.device) -> None:
    x = patterns()
    x = torch.cat((x, torch.linspace(-130.0, 130.0, x.numel())))
    y = torch.empty(x.shape, device=device)
    sigmoid_kernel[(x.numel() // 1024,)](x.to(device), y, 1024, enable_fp_fusion=False)
    assert_bitwise(y, reduction.canonical_nan(reference.sigmoid(x)))


@pytest.mark.covering
@pytest.mark.parametrize("shape", INTERPRETED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_shapes(name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    check(shape, "normal", dtype, device, name)


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", reference.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds(dtype: torch.dtype, name: str, kind: str, device: torch.device) -> None:
    check((5, 66), kind, dtype, device, name)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters(kind: str, device: torch.device) -> None:
    check((5, 66), kind, torch.bfloat16, device, "clamped_swiglu", **PARAMS)
    check((5, 66), kind, torch.float32, device, "situ_glu", beta1=0.3, beta2=17.0)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_strides_and_mixed_dtypes(name: str, device: torch.device) -> None:
    x = make("normal", (34, 20), torch.bfloat16)
    y = reference.forward(x, name)
    grad = make("normal", tuple(y.shape), torch.float32, seed=1)
    dx = reference.backward(grad, x, name)
    for layout, strided in awkward_layouts(x.to(device)).items():
        assert_bitwise(kernels.activation.forward(strided, name), y, layout)
        assert_bitwise(kernels.activation.backward(grad.to(device), strided, name), dx, layout)
    for layout, strided in awkward_layouts(grad.to(device)).items():
        assert_bitwise(kernels.activation.backward(strided, x.to(device), name), dx, layout)


def test_relu_makes_a_copy(device: torch.device) -> None:
    x = torch.rand(4, 4, device=device)
    assert_fresh([kernels.activation.forward(x, "relu")], [x])


def test_refuses(device: torch.device) -> None:
    x = torch.ones(2, 3, device=device)
    with pytest.raises(ValueError, match="activation is 'tanh'; use one of 'gelu', 'qgelu'"):
        kernels.activation.forward(x, "tanh")
    with pytest.raises(ValueError, match="swiglu has no parameter 'limit'; it takes none"):
        kernels.activation.forward(x, "swiglu", limit=1.0)
    with pytest.raises(ValueError, match=r"swiglu needs an even last dim, got shape \(2, 3\)"):
        kernels.activation.backward(x, x, "swiglu")
    with pytest.raises(ValueError, match=r"gradient of gelu has shape \(1, 3\), expected \(2, 3\)"):
        kernels.activation.backward(x[:1], x, "gelu")
    with pytest.raises(TypeError, match="gelu takes torch.bfloat16, torch.float16 or torch.float32"):
        kernels.activation.forward(x.double(), "gelu")
    with pytest.raises(TypeError, match="gradient of gelu takes torch.bfloat16"):
        kernels.activation.backward(x.double(), x, "gelu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_every_shape_and_kind(name: str, device: torch.device) -> None:
    gated = reference.ACTIVATIONS[name].gated
    for shape, kind, dtype in grid(SHAPES):
        check((*shape[:-1], 2 * shape[-1]) if gated else shape, kind, dtype, device, name)


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    for name, shape in (("swiglu", (2**19 + 3, 4112)), ("relu", (2**20 + 3, 2056))):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        y = kernels.activation.forward(x, name)
        assert_bitwise(y[-100:], reference.forward(x[-100:].cpu(), name))
        dx = kernels.activation.backward(y, x, name)
        assert_bitwise(dx[-100:], reference.backward(y[-100:].cpu(), x[-100:].cpu(), name))
        del x, y, dx


@pytest.mark.gpu
def test_captures_into_a_graph(device: torch.device) -> None:
    x = torch.randn(256, 384, dtype=torch.bfloat16, device=device)
    kernels.activation.forward(x, "swiglu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.activation.forward(x, "swiglu")
    x.mul_(2.0)
    graph.replay()
    assert_bitwise(y, reference.forward(x.cpu(), "swiglu"))
