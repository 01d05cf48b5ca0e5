"""Fused producers: what the quantize kernels compute on the way in equals the reference's two steps, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E4M3, E5M2, padded_rows
from narrowcast.testing import assert_close

from .checks import DTYPES, make

# Ragged in every way, and one that tiles divide, so that gradients of gated activations take the paired path.
SHAPES = [(1, 2), (5, 6), (33, 34), (2, 9, 130), (130, 128), (64, 256), (0, 8)]
GPU_SHAPES = [(33, 34), (2, 9, 130), (128, 512), (257, 1024), (1000, 520), (384, 768), (1024, 2048)]

Quantize = Callable[..., list[Tensor]]


def _scale(x: object) -> Tensor:
    return torch.tensor([24.0], device=x.device)  # type: ignore[attr-defined]


QUANTIZERS: dict[str, Callable[[object, object, bool, bool], list[Tensor]]] = {
    "given scale": lambda numerics, x, rows, columns: numerics.float8.quantize(
        x, _scale(x), E4M3, rowwise=rows, columnwise=columns
    ),
    "current": lambda numerics, x, rows, columns: numerics.float8.quantize_current(
        x, E5M2, power_2=False, epsilon=0.0, rowwise=rows, columnwise=columns
    ),
    "block 1-D": lambda numerics, x, rows, columns: numerics.float8_block.quantize(
        x, E4M3, rowwise=rows, columnwise=columns, block_dim=1, power_2=True, epsilon=0.0
    ),
    "block 2-D": lambda numerics, x, rows, columns: numerics.float8_block.quantize(
        x, E4M3, rowwise=rows, columnwise=columns, block_dim=2, power_2=False, epsilon=0.0
    ),
    "mxfp8": lambda numerics, x, rows, columns: numerics.mx.quantize(
        x, E4M3, rowwise=rows, columnwise=columns
    ),
    "mxfp8 2-D": lambda numerics, x, rows, columns: numerics.mx.quantize(
        x, E5M2, rowwise=rows, columnwise=columns, two_d=True
    ),
}


def _half(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2)


def _norm_operands(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, normalization: str
) -> dict[str, Tensor | None]:
    return {
        "x": make(kind, shape, dtype),
        "residual": make("normal", shape, dtype, 1) if shape[0] % 2 else None,
        "weight": make("normal", shape[-1:], dtype, 2),
        "bias": make("normal", shape[-1:], dtype, 3) if normalization == "LayerNorm" else None,
    }


def _activation(name: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype, **parameters: float):
    x = make(kind, shape, dtype)
    return lambda numerics, device: numerics.fused_producers.activation(x.to(device), name, **parameters)


def _activation_backward(
    name: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype, **parameters: float
):
    gated = reference.activation.ACTIVATIONS[name].gated
    x, grad = make(kind, shape, dtype), make("normal", _half(shape) if gated else shape, dtype, 1)
    return lambda numerics, device: numerics.fused_producers.activation_backward(
        grad.to(device), x.to(device), name, column_sums=True, **parameters
    )


def _norm(normalization: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype, centered: bool):
    operands = _norm_operands(shape, kind, dtype, normalization)

    def build(numerics, device):
        moved = {name: None if t is None else t.to(device) for name, t in operands.items()}
        options = {"eps": 1e-5, "normalization": normalization, "zero_centered_gamma": centered}
        return numerics.fused_producers.normalized(
            **moved, **options, wanted="source" if centered else "amax"
        )[0]

    return build


def _norm_backward(normalization: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype, centered: bool):
    operands = _norm_operands(shape, kind, dtype, normalization)
    x, residual, weight = operands["x"], operands["residual"], operands["weight"]
    grad = make("normal", shape, dtype, 4)
    _, mean, rstd = reference.norm.statistics(x, eps=1e-5, normalization=normalization)
    c1, c2, _, _ = reference.norm.gradient_statistics(
        grad, x, weight, mean, rstd, zero_centered_gamma=centered
    )

    def build(numerics, device):
        moved = [None if t is None else t.to(device) for t in (grad, x, weight, mean, rstd, c1, c2, residual)]
        return numerics.fused_producers.norm_backward(
            *moved[:7], zero_centered_gamma=centered, residual_grad=moved[7]
        )

    return build


def _check(build, quantize: str, device: torch.device, directions: tuple[bool, bool] = (True, True)) -> None:
    source, expected_source = build(kernels, device), build(reference, torch.device("cpu"))
    actual = QUANTIZERS[quantize](kernels, source, *directions)
    expected = QUANTIZERS[quantize](reference, expected_source, *directions)
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(a, b, f"{quantize} {source.constants} {source.shape} {source.dtype} buffer {index}")
    assert_bitwise(kernels.fused_producers.materialize(source), expected_source)
    if source.column_sums is not None:
        assert_bitwise(
            kernels.fused_producers.column_sum(source),
            reference.fused_producers.column_sum(expected_source),
            "column sums",
        )


PRODUCERS: dict[str, Callable[[tuple[int, ...], torch.dtype], Callable]] = {
    "activation": lambda shape, dtype: _activation("swiglu", shape, "normal", dtype),
    "activation backward": lambda shape, dtype: _activation_backward("swiglu", shape, "normal", dtype),
    "norm": lambda shape, dtype: _norm("RMSNorm", shape, "normal", dtype, False),
    "norm backward": lambda shape, dtype: _norm_backward("LayerNorm", shape, "normal", dtype, True),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sources(quantize: str, shape: tuple[int, ...], producer: str, device: torch.device) -> None:
    _check(PRODUCERS[producer](shape, DTYPES[SHAPES.index(shape) % 3]), quantize, device)


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("shape", [(1, 2), (33, 34), (130, 128), (0, 8)], ids=str)
def test_gradients_of_logits(quantize: str, shape: tuple[int, int], device: torch.device) -> None:
    """Equal the kernel's own two steps: exponentials differ by a bit between a CPU and a GPU."""
    logits = make("normal", shape, torch.bfloat16).to(device)
    target = torch.arange(shape[0], device=device) % shape[1] - 1  # the first one is no column
    lse = torch.logsumexp(logits.float(), 1)
    grad = torch.linspace(0.0, 1.0, shape[0], device=device)  # the first row has no gradient
    arguments = logits, target, lse, grad, 0.9, 0.1 / shape[1]
    fused = kernels.fused_producers.cross_entropy_gradient(*arguments, column_sums=True)
    written = kernels.cross_entropy.gradient(*arguments)
    actual = QUANTIZERS[quantize](kernels, fused, True, True)
    for a, b in zip(actual, QUANTIZERS[quantize](kernels, written, True, True), strict=True):
        assert_bitwise(a, b)
    assert_bitwise(kernels.fused_producers.column_sum(fused), kernels.fused_producers.column_sum(written))
    close = reference.fused_producers.cross_entropy_gradient(
        *(x.cpu() if isinstance(x, Tensor) else x for x in arguments)
    )
    assert_close(written.cpu(), close, "bf16_output")


def _rounded(shape: tuple[int, ...], kind: str, dtype: torch.dtype, to: torch.dtype):
    x = make(kind, shape, dtype)
    return lambda numerics, device: numerics.fused_producers.rounded(x.to(device), to)


# From fp32 to what a model computes in, to the other dtypes, to itself.
CONVERSIONS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float32),
]
CONVERSIONS.append((torch.bfloat16, torch.bfloat16))


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["special", "tiny"])
def test_rounded(quantize: str, shape: tuple[int, ...], kind: str, device: torch.device) -> None:
    """A shard in fp32 is quantized as the model's dtype would be; one direction alone takes a kernel of its own."""
    at = SHAPES.index(shape)
    for directions in [(True, False), (True, True)][at % 2 :]:
        _check(_rounded(shape, kind, *CONVERSIONS[at % 4]), quantize, device, directions)


def test_rounded_elements_are_written_nowhere(device: torch.device) -> None:
    source = _rounded((12, 256), "normal", *CONVERSIONS[0])(kernels, device)
    source.compute = lambda _: pytest.fail("the rounded tensor was written")
    for quantize in QUANTIZERS:
        if quantize != "current":  # whose amax is given where it matters
            QUANTIZERS[quantize](kernels, source, True, False)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("kind", "quantize"), [("normal", "given scale"), ("special", "block 1-D"), ("wide", "mxfp8")]
)
@pytest.mark.parametrize("direction", [_activation, _activation_backward])
@pytest.mark.parametrize("name", reference.activation.ACTIVATIONS)
def test_activations(
    name: str, direction: Callable[..., Callable], kind: str, quantize: str, device: torch.device
) -> None:
    given = {"clamped_swiglu": {"limit": 0.5, "alpha": 1.5}, "situ_glu": {"beta1": 0.5, "beta2": 3.0}}
    _check(direction(name, (33, 36), kind, torch.bfloat16, **given.get(name, {})), quantize, device)


@pytest.mark.parametrize("kind", ["normal", "special"])
@pytest.mark.parametrize("quantize", ["current", "block 1-D", "block 2-D"])
def test_gradients_of_gated_activations_are_not_written(
    quantize: str, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tiles fit their halves; such a gradient would be the largest tensor of a backward.

    Small ones are, where that spares a launch.
    """
    build = _activation_backward("swiglu", (12, 256), kind, torch.bfloat16)
    _check(build, quantize, device)
    monkeypatch.setattr(kernels.float8, "SMALL", 0)
    _check(build, quantize, device)
    source = build(kernels, device)
    source.compute = lambda _: pytest.fail("the gradient was written")
    QUANTIZERS[quantize](kernels, source, True, True)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("quantize", "directions"),
    [("given scale", (True, False)), ("current", (False, True)), ("block 2-D", (True, True))],
)
@pytest.mark.parametrize(("direction", "dtype"), [(_norm, torch.float32), (_norm_backward, torch.float16)])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("normalization", reference.norm.NORMALIZATIONS)
def test_norms(
    normalization: str,
    centered: bool,
    direction: Callable[..., Callable],
    dtype: torch.dtype,
    quantize: str,
    directions: tuple[bool, bool],
    device: torch.device,
) -> None:
    _check(direction(normalization, (35, 40), "wide", dtype, centered), quantize, device, directions)


def test_a_norm_wanted_as_a_matrix_is_one(device: torch.device) -> None:
    operands = _norm_operands((5, 40), "normal", torch.bfloat16, "LayerNorm")
    moved = {name: None if t is None else t.to(device) for name, t in operands.items()}
    options = {"eps": 1e-5, "normalization": "LayerNorm", "zero_centered_gamma": False, "wanted": "matrix"}
    source, *statistics = kernels.fused_producers.normalized(**moved, **options)
    assert source.is_tensor
    expected = reference.fused_producers.normalized(**operands, **options)
    for a, b in zip((source.operands[0], *statistics), expected, strict=True):
        assert_bitwise(a, b)


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("shape", [(1, 4), (5, 3), (130, 132), (64, 128), (0, 4)], ids=str)
def test_column_sums(quantize: str, shape: tuple[int, ...], device: torch.device) -> None:
    x = make("zeros", shape, torch.bfloat16)
    _check(
        lambda numerics, device: numerics.fused_producers.tensor(x.to(device), column_sums=True),
        quantize,
        device,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "special"])
def test_every_source(quantize: str, shape: tuple[int, ...], kind: str, device: torch.device) -> None:
    dtype = DTYPES[GPU_SHAPES.index(shape) % 3]
    for name in ("swiglu", "gelu", "clamped_swiglu", "sreglu"):
        _check(_activation(name, shape, kind, dtype), quantize, device)
        _check(_activation_backward(name, shape, kind, dtype), quantize, device)
    for normalization in reference.norm.NORMALIZATIONS:
        _check(_norm(normalization, shape, kind, dtype, False), quantize, device)
        _check(_norm_backward(normalization, shape, kind, dtype, False), quantize, device)


def test_refuses_an_unknown_activation(device: torch.device) -> None:
    x = torch.ones(4, 4, device=device)
    for numerics in (kernels, reference):
        with pytest.raises(ValueError, match="activation is 'swish'"):
            numerics.fused_producers.activation(x, "swish")
        with pytest.raises(ValueError, match="has no parameter 'limit'"):
            numerics.fused_producers.activation(x, "silu", limit=1.0)


def test_an_unsupported_dtype_is_one_error_everywhere(device: torch.device) -> None:
    """The kernels and the reference raise the same class, so code may catch it on a CPU and on a GPU."""
    x, one = torch.ones(32, 32, dtype=torch.float64), torch.ones(1)
    for numerics, where in ((reference, torch.device("cpu")), (kernels, device)):
        wide, scale = x.to(where), one.to(where)
        attempts: list[Callable[[], object]] = [
            lambda numerics=numerics, wide=wide, scale=scale: numerics.float8.quantize(
                wide, scale, E4M3, rowwise=True, columnwise=True
            ),
            lambda numerics=numerics, wide=wide, scale=scale: numerics.mx.quantize(
                wide, E4M3, rowwise=True, columnwise=False
            ),
            lambda numerics=numerics, wide=wide, scale=scale: numerics.norm.statistics(
                wide, normalization="RMSNorm", eps=1e-5
            ),
            lambda numerics=numerics, wide=wide, scale=scale: numerics.fused_producers.activation(
                wide, "gelu"
            ),
        ]
        for attempt in attempts:
            with pytest.raises(TypeError, match=r"torch\.float64"):
                attempt()


def test_refuses_what_the_formats_cannot_take(device: torch.device) -> None:
    with pytest.raises(TypeError, match="cannot quantize torch.float64"):
        kernels.fused_producers.tensor(torch.ones(4, 4, dtype=torch.float64, device=device), column_sums=True)
    with pytest.raises(TypeError, match="cannot quantize torch.int8"):
        kernels.fused_producers.rounded(torch.ones(4, 4, device=device), torch.int8)
    row = kernels.fused_producers.activation(torch.ones(8, device=device), "silu")
    for name in ("block 1-D", "mxfp8"):
        with pytest.raises(ValueError, match="rank 1; this format needs rank 2"):
            QUANTIZERS[name](kernels, row, True, True)


@pytest.mark.parametrize(
    ("splits", "columns", "more"), [([130, 0, 5], 40, 0), ([3, 256], 136, -130), ([0, 0], 64, 7)], ids=str
)
def test_rows_of_groups(splits: list[int], columns: int, more: int, device: torch.device) -> None:
    """Of as many rows as the splits say, of more, and of fewer, where nothing beyond them may be read."""
    total = sum(splits) + more
    groups = torch.tensor(splits, dtype=torch.int32 if more else torch.int64)
    rows = padded_rows(total, len(splits), 128)
    x = make("blocks", (total, columns), torch.bfloat16)
    padded = reference.grouped_sources.rows_of_groups(x, groups, rows)
    source = kernels.grouped_sources.rows_of_groups(x.to(device), groups.to(device), rows)
    for name in ("block 1-D", "mxfp8"):
        expected = QUANTIZERS[name](reference, padded, True, True)
        for ours, theirs in zip(QUANTIZERS[name](kernels, source, True, True), expected, strict=True):
            assert_bitwise(ours, theirs, name)
    assert_bitwise(kernels.fused_producers.materialize(source), padded)
