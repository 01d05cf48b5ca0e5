"""The grouped operators: what they describe is what they give, and on a GPU the native GEMMs equal the decoded ones."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from recipes import DEVICE
from torch import Tensor

import narrowcast as nc
from narrowcast import functional, reference
from narrowcast.functional.grouped_decoded import padded_places
from narrowcast.quantizers import Operand
from narrowcast.tensors import grouped_layout
from narrowcast.testing import assert_close

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
K, N = 48, 144


def block(dim: int) -> nc.Quantizer:
    return nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


def halves(
    row: nc.Quantizer, source: str = "original", columns: nc.Quantizer | None = None
) -> nc.HybridQuantizer:
    columns = columns or nc.MXFP8Quantizer(E4M3)
    return nc.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=columns, columnwise_source=source)


QUANTIZERS: dict[str, tuple[Any, Any, Any]] = {  # of input, weight and grad_output
    "e4m3": tuple(nc.Float8CurrentScalingQuantizer(element) for element in (E4M3, E4M3, E4M3)),
    "hybrid": tuple(nc.Float8CurrentScalingQuantizer(element) for element in (E4M3, E4M3, E5M2)),
    "block": (block(1), block(2), block(1)),
    "mxfp8": tuple(nc.MXFP8Quantizer(E4M3) for _ in range(3)),
    "mxfp4": tuple(nc.MXFP4Quantizer() for _ in range(3)),
    "nvfp4": tuple(nc.NVFP4Quantizer() for _ in range(3)),
    "rotated nvfp4": (
        nc.NVFP4Quantizer(with_rht=True),
        nc.NVFP4Quantizer(with_2d_quantization=True),
        nc.NVFP4Quantizer(with_rht=True),
    ),
    "4 over 6": tuple(nc.NVFP4Quantizer(nvfp4_use_4over6=True) for _ in range(3)),
    "halves": tuple(halves(nc.NVFP4Quantizer()) for _ in range(3)),
    "decoded halves": tuple(halves(nc.NVFP4Quantizer(), "rowwise_dequantized") for _ in range(3)),
    "tensor halves": tuple(halves(nc.Float8CurrentScalingQuantizer(E4M3)) for _ in range(3)),
    "row scaled": tuple(nc.NVFP4Quantizer(row_scaled_nvfp4=True) for _ in range(3)),
    "row scaled 4 over 6": tuple(
        nc.NVFP4Quantizer(row_scaled_nvfp4=True, nvfp4_use_4over6=True) for _ in range(3)
    ),
    "row scaled halves": tuple(
        halves(nc.NVFP4Quantizer(row_scaled_nvfp4=True), "rowwise_dequantized") for _ in range(3)
    ),
    "rows and plain": tuple(
        halves(nc.NVFP4Quantizer(row_scaled_nvfp4=True), "rowwise_dequantized", nc.IdentityQuantizer())
        for _ in range(3)
    ),
    "plain and tensor": tuple(
        halves(nc.IdentityQuantizer(), "original", nc.Float8CurrentScalingQuantizer(E4M3)) for _ in range(3)
    ),
    "plain fp32": tuple(nc.IdentityQuantizer(dtype=torch.float32) for _ in range(3)),
    "plain beside blocks": (
        nc.IdentityQuantizer(),
        halves(nc.MXFP8Quantizer(E4M3), "original", nc.IdentityQuantizer(dtype=torch.float32)),
        nc.NVFP4Quantizer(row_scaled_nvfp4=True),
    ),
    "identity": tuple(nc.IdentityQuantizer() for _ in range(3)),
}
NATIVE = ("e4m3", "hybrid", "block")
KINDS = {"fprop": (0, 1, False, False), "dgrad": (2, 1, False, True), "wgrad": (2, 0, True, True)}


class Case:
    """Operands of the three GEMMs of one grouped layer."""

    def __init__(
        self, name: str, splits: list[int], beyond: int = 4, sizes: tuple[int, int] = (K, N)
    ) -> None:
        self.K, self.N = sizes
        self.rows = sum(splits) + beyond
        self.splits = torch.tensor(splits, device=DEVICE)
        self.quantizers = QUANTIZERS[name]
        self.layout = grouped_layout(self.quantizers[0]._storage_name)
        generator = torch.Generator().manual_seed(0)
        x, dy = (torch.randn(self.rows, n, generator=generator).bfloat16().to(DEVICE) for n in sizes)
        self.weights = [
            torch.randn(self.N, self.K, generator=generator).bfloat16().to(DEVICE) for _ in splits
        ]
        self.bias = torch.randn(len(splits), self.N, generator=generator).bfloat16().to(DEVICE)
        self.inputs = (x, self.weights, dy)
        quantize, layout = functional.grouped_quantize, self.layout
        self.made = (
            quantize(x, self.splits, self.quantizers[0], layout),
            functional.grouped_quantize_weights(self.weights, self.quantizers[1], layout),
            quantize(dy, self.splits, self.quantizers[2], layout),
        )

    def arguments(
        self,
        kind: str,
        dtype: torch.dtype = torch.bfloat16,
        emulate: bool = False,
        with_bias: bool = True,
    ) -> tuple[Any, ...]:
        left, right, a, b = KINDS[kind]
        operands = []
        for index, columnwise in ((left, a), (right, b)):
            operand = functional.operand_of(self.made[index], self.layout, columnwise)
            operands += [operand, self.quantizers[index], self.layout, torch.bfloat16]
        biases = [self.bias] if kind == "fprop" and with_bias else []
        return (kind, *operands, self.splits, biases, dtype, self.rows, self.N, self.K, False, emulate)

    def multiply(self, kind: str, **kwargs: Any) -> Tensor:
        return functional.grouped_gemm(*self.arguments(kind, **kwargs))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_fakes_describe_what_the_operators_give(name: str) -> None:
    from torch._subclasses import FakeTensorMode

    case = Case(name, [20, 0, 13])
    for index, op in ((0, functional.grouped_quantize), (1, functional.grouped_quantize_weights)):
        given = (case.inputs[index],) if index else (case.inputs[0], case.splits)
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, given)
            described = op(*fake, case.quantizers[index], case.layout)
        for a, b in zip(described, case.made[index], strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        pointers = [buffer.untyped_storage().data_ptr() for buffer in case.made[index]]
        assert len(set(pointers)) == len(pointers)
    for kind in KINDS:
        arguments = case.arguments(kind, emulate=True)
        real = functional.grouped_gemm(*arguments)
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
            described = functional.grouped_gemm(*fake)
        assert (described.shape, described.dtype, described.stride()) == (
            real.shape,
            real.dtype,
            real.stride(),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_high_precision(kind: str) -> None:
    """Padding of features to what the library GEMM needs included."""
    for sizes in ((K, N), (7, 13)):
        case = Case("identity", [20, 0, 13], sizes=sizes)
        x, weights, dy = case.inputs
        left = x if kind == "fprop" else dy
        right = [x] if kind == "wgrad" else weights
        biases = [case.bias] if kind == "fprop" else []
        out = functional.grouped_mm(kind, left, right, case.splits, biases, False, left.dtype)
        parts, others = left.split([20, 0, 13, 4]), x.split([20, 0, 13, 4])
        for group, at in ((0, slice(0, 20)), (2, slice(20, 33))):
            if kind == "wgrad":
                ours, expected = out[group], parts[group].float().t() @ others[group].float()
            elif kind == "dgrad":
                ours, expected = out[at], parts[group].float() @ weights[group].float()
            else:
                product = parts[group].float() @ weights[group].float().t()
                ours, expected = out[at], product + case.bias[group].float()
            assert torch.allclose(ours.float(), expected, rtol=2e-2, atol=5e-2)
        assert (out[1 if kind == "wgrad" else slice(33, None)] == 0).all()


def test_stacking_copies_only_what_lies_apart() -> None:
    stack = importlib.import_module("narrowcast.functional.grouped_quantize").stack
    whole = torch.arange(24.0).view(2, 3, 4)
    views = list(whole.unbind(0))
    assert stack(views).data_ptr() == whole.data_ptr()
    assert torch.equal(stack(views), whole)
    for apart in ([views[1], views[0]], [views[0], views[1].clone()], [views[0].t(), views[1].t()]):
        stacked = stack(apart)
        assert stacked.data_ptr() != whole.data_ptr()
        assert torch.equal(stacked, torch.stack(apart))
    assert stack([whole]).data_ptr() == whole.data_ptr()


def test_refuses_another_kind() -> None:
    case = Case("e4m3", [4])
    with pytest.raises(ValueError, match="kind is 'forward'"):
        functional.grouped_gemm("forward", *case.arguments("fprop")[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [[24, 0, 9], [130, 20, 5], [0, 0, 0], [512, 256, 128]], ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_native_equals_decoded(name: str, splits: list[int]) -> None:
    for sizes in ((K, N), (50, 70), (512, 256)):
        case = Case(name, splits, sizes=sizes)
        for kind in KINDS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                native, decoded = (
                    case.multiply(kind, dtype=dtype),
                    case.multiply(kind, dtype=dtype, emulate=True),
                )
                assert native.shape == decoded.shape and native.dtype == dtype and native.is_contiguous()
                bound = 2e-2 * max(float(decoded.float().abs().max()), 1e-6)
                assert (native.float() - decoded.float()).abs().max() <= bound, (sizes, kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZERS)
def test_nothing_waits_for_the_splits(name: str) -> None:
    """No synchronisation, and a captured graph follows the splits."""
    case = Case(name, [100, 30, 126], beyond=0)

    def step() -> list[Tensor]:
        x, weights, dy = case.inputs
        quantize, layout = functional.grouped_quantize, case.layout
        case.made = (
            quantize(x, case.splits, case.quantizers[0], layout),
            functional.grouped_quantize_weights(weights, case.quantizers[1], layout),
            quantize(dy, case.splits, case.quantizers[2], layout),
        )
        sums = functional.grouped_column_sum(dy, case.splits)
        emulate = name not in NATIVE
        dtypes = torch.bfloat16, torch.float16, torch.float32
        return [*(case.multiply(kind, dtype=d, emulate=emulate) for kind in KINDS for d in dtypes), sums]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for splits in ([100, 30, 126], [0, 200, 40], [256, 0, 0]):
        case.splits.copy_(torch.tensor(splits))
        graph.replay()
        for ours, expected in zip(captured, step(), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_formats_without_a_native_gemm(name: str) -> None:
    case = Case(name, [20, 12])
    with pytest.raises(RuntimeError, match="emulate=True"):
        case.multiply("fprop")
    assert case.multiply("fprop", emulate=True).abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name, kind", [("plain and tensor", "fprop"), ("rows and plain", "wgrad")])
def test_high_precision_in_both_operands_needs_no_emulation(name: str, kind: str) -> None:
    case = Case(name, [20, 12])
    assert torch.equal(case.multiply(kind), case.multiply(kind, emulate=True))


def refuse_reads(patch: pytest.MonkeyPatch) -> None:
    """Let reading a tensor on the host raise: a GPU would have to be waited for."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the host read a tensor")

    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__index__", "numpy"):
        patch.setattr(Tensor, name, refuse)
    patch.setattr(reference.grouped_quantize, "extents", refuse)


grouped = importlib.import_module("narrowcast.functional.grouped_gemm")
quantizing = importlib.import_module("narrowcast.functional.grouped_quantize")


def masked_product(kind: str, left: Tensor, right: Tensor, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Stand-in for the GPU's grouped product: rows of other groups are zero; nothing is read."""
    group = torch.searchsorted(splits.cumsum(0), torch.arange(left.shape[0]), right=True)
    own = left.float() * (group == torch.arange(splits.shape[0]).unsqueeze(1)).unsqueeze(2)
    if kind == "wgrad":
        return (own.transpose(1, 2) @ right.float()).to(dtype)
    weights = right.float() if kind == "dgrad" else right.float().transpose(1, 2)
    return (own @ weights).sum(0).to(dtype)


DECODED = [*QUANTIZERS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODED)
def test_an_emulated_product_reads_no_splits(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: all groups decoded at once, with the numbers of one group after the other."""
    for multiply in ("_product", "_unrounded"):
        monkeypatch.setattr(grouped, multiply, masked_product)
    for splits, beyond in (([40, 0, 3, 129], 4), ([0, 7], 0), ([0, 0], 5)):
        case = Case(name, splits, beyond)
        expected = functional.grouped_gemm(*case.arguments(kind, torch.float32))
        kind_, *operands, own_splits, biases, dtype, rows, n, k, _, _ = case.arguments(kind, torch.float32)
        a, b = (grouped._Operand(*operands[at : at + 4]) for at in (0, 4))
        bias, sizes = grouped._stacked(biases), grouped._Sizes(rows, n, k)
        a, b = grouped._opened(kind, a, b, sizes, len(splits))
        assert a.is_decoded() and b.is_decoded()
        with pytest.MonkeyPatch.context() as patch:
            refuse_reads(patch)
            ours = grouped._multiply_decoded(kind_, a, b, own_splits, bias, dtype, sizes)
        assert_close(ours, expected, "fp32_sum_order")


def padded(x: Tensor, splits: Tensor, *_: Any) -> Tensor:
    """Stand-in for the GPU's padding of groups to 128 rows; nothing is read."""
    rows = (x.shape[0] + len(splits) * 127 + 127) // 128 * 128
    group = torch.searchsorted(splits.cumsum(0), torch.arange(x.shape[0]), right=True)
    places = torch.where(group < len(splits), padded_places(splits, group, 128), rows)
    return x.new_zeros(rows + 1, x.shape[1]).index_copy(0, places, x)[:rows]


@pytest.mark.parametrize(
    "name", [name for name in DECODED if name not in ("e4m3", "hybrid", "tensor halves", "plain and tensor")]
)
def test_quantizing_reads_no_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats in blocks, which a GPU quantizes as one matrix with padded groups."""
    case = Case(name, [40, 0, 3, 129])
    how = case.splits, case.quantizers[2], case.layout
    expected = functional.grouped_quantize(case.inputs[2], *how)
    monkeypatch.setattr(quantizing, "_padded", lambda x, splits, *_: padded(x, splits))
    refuse_reads(monkeypatch)
    ours = functional.grouped_quantize(case.inputs[2], *how)
    monkeypatch.undo()
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in DECODED if name != "block"])
def test_a_group_is_quantized_as_if_it_were_alone(name: str, dtype: torch.dtype) -> None:
    """Odd groups, empty ones, rows of none, and no rows at all: the codes and scales of both directions."""
    quantizer = QUANTIZERS[name][2]
    layout = grouped_layout(quantizer._storage_name)
    for sizes, beyond in (([40, 0, 3, 129], 4), ([0, 1], 0), ([0, 0], 7), ([0], 0)):
        rows = sum(sizes) + beyond
        x = torch.randn(rows, 33, generator=torch.Generator().manual_seed(rows)).to(dtype)
        made = functional.grouped_quantize(x, torch.tensor(sizes), quantizer, layout)
        parts = x.split([*sizes, beyond])
        for columnwise in (False, True):
            operand = grouped._Operand(
                functional.operand_of(made, layout, columnwise), quantizer, layout, dtype
            ).opened(columnwise, (rows, 33), len(sizes))
            for part, own in zip(parts, operand.by_group(columnwise, sizes, 33)):
                if not part.shape[0]:
                    continue
                alone = Operand.of(quantizer).quantize(part)
                for ours, theirs in zip(own, alone.columnwise if columnwise else alone.rowwise):
                    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("name", DECODED)
def test_decoding_reads_no_splits(name: str) -> None:
    case = Case(name, [40, 0, 3, 129])
    operand = functional.operand_of(case.made[0], case.layout, False)
    quantizer, start, parts = case.quantizers[0], 0, []
    for size in (40, 0, 3, 129):
        if size:
            parts.append(
                quantizer.quantize(case.inputs[0][start : start + size]).dequantize(dtype=torch.bfloat16)
            )
        start += size
    how = quantizer, case.layout, case.splits, torch.bfloat16, [case.rows, case.K]
    with pytest.MonkeyPatch.context() as patch:
        refuse_reads(patch)
        ours = functional.grouped_dequantize(operand, *how)
    assert torch.equal(ours[:start], torch.cat(parts)) and not ours[start:].any()


class Own(nc.NVFP4Quantizer):
    """Of a user: what it does with rows is not known."""

    def _encode(self, numerics: Any, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        return super()._encode(numerics, x, seed)


class OwnInBlocks(nc.MXFP8Quantizer):
    def _encode(self, numerics: Any, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        return super()._encode(numerics, x, seed)


for one in (Own, OwnInBlocks):
    nc.dynamo.register_value_opaque_quantizer(one)


@pytest.mark.parametrize(
    ("quantizer", "found"),
    [
        (OwnInBlocks(E4M3), True),
        (Own(), False),
        (nc.HybridQuantizer(rowwise_quantizer=Own(), columnwise_quantizer=nc.NVFP4Quantizer()), False),
        (nc.quantizers.Float8RowsQuantizer(E4M3), True),
    ],
    ids=["in blocks", "own", "half", "ours"],
)
def test_a_graph_does_not_wait_in_silence(quantizer: Any, found: bool) -> None:
    """On a GPU: for a quantizer of a user's whose groups the device does not find; a CPU has nothing to wait for."""
    from torch._subclasses import FakeTensorMode

    layout = grouped_layout(quantizer._storage_name)
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            x, splits = torch.empty(40, K, device=device), torch.empty(2, dtype=torch.int64, device=device)
            weights = functional.grouped_quantize_weights([x.new_empty(N, K)] * 2, quantizer, layout)
            right = functional.operand_of(weights, layout, False)
            left = [torch.empty(64, dtype=torch.uint8, device=device)]
            how = quantizer, layout, torch.float32
            rest = [], torch.float32, 40, 40, K, False, True
            for call in (
                lambda: functional.grouped_quantize(x, splits, quantizer, layout),
                lambda: functional.grouped_gemm("fprop", left, *how, right, *how, splits, *rest),
            ):
                if found or device == "cpu":
                    call()
                    continue
                with pytest.raises(
                    RuntimeError, match="takes the rows of each group .* torch.compiler.disable"
                ):
                    call()


def test_a_capture_does_not_wait_for_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="which a CUDA graph cannot hold.* leave the layer out of the capture"
    ):
        reference.grouped_quantize.extents(OnGpu(), 4, 1)  # type: ignore[arg-type]
