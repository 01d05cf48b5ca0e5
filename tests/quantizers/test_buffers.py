"""What a quantizer says it makes, and what it makes: names, shapes, dtypes, strides, context, storage class."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference.checks import EMPTY_SHAPES, RAGGED_SHAPES, normal

import narrowcast as nc
from narrowcast.formats import cdiv, round_up
from narrowcast.quantizers import Float8RowsQuantizer

from .catalog import (
    E4M3,
    ONE_OF_EACH,
    SHAPES,
    USAGES,
    VARIANTS,
    assert_own_memory,
    buffers,
    delayed,
    quantize,
)

U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}
each_usage = pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
each_quantizer = pytest.mark.parametrize("name", WITH_DELAYED)


def expected_buffers(name: str, quantizer: nc.Quantizer, shape: tuple[int, ...]) -> dict[str, tuple]:
    """The table of the specification, row by row, for both directions."""
    m, k, lead = math.prod(shape[:-1]), shape[-1], shape[:-1]
    if isinstance(quantizer, nc.NVFP4Quantizer):
        amaxes = (m, k) if quantizer.row_scaled_nvfp4 else (1, 1)
        return {
            "_rowwise_data": ((*lead, round_up(k, 16) // 2), U8),
            "_rowwise_scale_inv": ((round_up(m, 128), round_up(cdiv(k, 16), 4)), U8),
            "_columnwise_data": ((k, round_up(m, 16) // 2), U8),
            "_columnwise_scale_inv": ((round_up(k, 128), round_up(cdiv(m, 16), 4)), U8),
            "_amax_rowwise": ((amaxes[0],), F32),
            "_amax_columnwise": ((amaxes[1],), F32),
        }
    if isinstance(quantizer, nc.MXFP8Quantizer):
        return {
            "_rowwise_data": (shape, U8),
            "_rowwise_scale_inv": ((round_up(m, 128), round_up(cdiv(k, 32), 4)), U8),
            "_columnwise_data": (shape, U8),
            "_columnwise_scale_inv": ((round_up(cdiv(m, 32), 4), round_up(k, 128)), U8),
        }
    if isinstance(quantizer, (nc.MXFP6Quantizer, nc.MXFP4Quantizer)):
        bits = 6 if isinstance(quantizer, nc.MXFP6Quantizer) else 4
        return {
            "_rowwise_data": ((*lead, round_up(k, 32) * bits // 8), U8),
            "_rowwise_scale_inv": ((round_up(m, 128), round_up(cdiv(k, 32), 4)), U8),
            "_columnwise_data": ((k, round_up(m, 32) * bits // 8), U8),
            "_columnwise_scale_inv": ((round_up(k, 128), round_up(cdiv(m, 32), 4)), U8),
        }
    if isinstance(quantizer, nc.Float8BlockQuantizer):
        two_d = quantizer.block_scaling_dim == 2
        return {
            "_rowwise_data": (shape, U8),
            "_rowwise_scale_inv": (
                (cdiv(m, 128), round_up(cdiv(k, 128), 4)) if two_d else (cdiv(k, 128), round_up(m, 4)),
                F32,
            ),
            "_columnwise_data": ((k, *lead), U8),
            "_columnwise_scale_inv": (
                (cdiv(k, 128), round_up(cdiv(m, 128), 4)) if two_d else (cdiv(m, 128), round_up(k, 4)),
                F32,
            ),
        }
    if isinstance(quantizer, Float8RowsQuantizer):
        return {
            "_rowwise_data": (shape, U8),
            "_rowwise_scale_inv": ((m,), F32),
            "_columnwise_data": ((k, *lead), U8),
            "_columnwise_scale_inv": ((k,), F32),
        }
    if isinstance(quantizer, nc.IdentityQuantizer):
        return {"_hp_data": (shape, torch.float32 if quantizer.hp_dtype else BF16)}
    return {"_data": (shape, U8), "_transpose": ((k, *lead), U8), "_scale_inv": ((1,), F32)}


def kept(name: str, quantizer: nc.Quantizer) -> bool:
    """Whether a buffer exists for the quantizer's usage."""
    if name in ("_scale_inv", "_hp_data"):
        return True
    columnwise = name == "_transpose" or "columnwise" in name
    return quantizer.columnwise_usage if columnwise else quantizer.rowwise_usage


@each_usage
@each_quantizer
def test_described_made_and_allocated_agree_with_the_table(name: str, usage: tuple[bool, bool]) -> None:
    quantizer = WITH_DELAYED[name].with_usage(*usage)
    for shape in (*SHAPES, (130, 257), (2, 3, 4, 40)):
        table = expected_buffers(name, quantizer, shape)
        expected = {key: value for key, value in table.items() if kept(key, quantizer)}
        described = quantizer._describe_buffers(shape, BF16)
        assert list(described.items()) == list(expected.items())
        real = quantize(quantizer, normal(shape, BF16))
        empty = quantizer.make_empty(shape, dtype=BF16, device="cpu")
        allocated = quantizer.alloc_tensors(shape, device="cpu", dtype=BF16)
        for made in (buffers(real), buffers(empty), allocated):
            assert {key: (tuple(b.shape), b.dtype) for key, b in made.items()} == expected
            assert list(made) == list(expected)
            assert all(b.is_contiguous() and b.device.type == "cpu" for b in made.values())
        assert_own_memory(real, empty)


@each_usage
@each_quantizer
@pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])
def test_context_class_and_metadata_agree(name: str, usage: tuple[bool, bool], internal: bool) -> None:
    quantizer = WITH_DELAYED[name].with_usage(*usage).replace(internal=internal)
    shape, x = (33, 50), normal((33, 50), BF16)
    real, empty = quantizer.quantize(x), quantizer.make_empty(shape, dtype=BF16, device="cpu")
    cls, scalars = quantizer._storage_metadata(BF16)
    assert type(real) is type(empty) is cls is quantizer._resolve_storage_cls()
    assert isinstance(real, torch.Tensor) is not internal
    assert isinstance(real, quantizer._storage_class)
    assert scalars == {"quantizer": quantizer, "fake_dtype": BF16} == quantizer._storage_scalars(BF16)
    names, context = real.__tensor_flatten__()
    assert (names, context) == empty.__tensor_flatten__()
    assert context == quantizer.create_metadata(shape, dtype=BF16)
    assert names == list(quantizer._describe_buffers(shape, BF16))
    assert not any(isinstance(value, torch.Tensor) for value in context.values())
    assert real.device == empty.device == torch.device("cpu")
    assert (real.dtype, tuple(real.shape), real.stride() if not internal else None) == (
        empty.dtype,
        tuple(empty.shape),
        empty.stride() if not internal else None,
    )
    assert real.get_usages() == empty.get_usages()


@pytest.mark.parametrize("name", VARIANTS)
def test_metadata_of_a_tensor_that_needs_a_gradient(name: str) -> None:
    quantizer = VARIANTS[name]
    real = quantizer.quantize(normal((32, 48), BF16).requires_grad_(True))
    empty = quantizer.make_empty((32, 48), dtype=BF16, device="cpu", requires_grad=True)
    context = quantizer.create_metadata((32, 48), dtype=BF16, requires_grad=True)
    assert real.__tensor_flatten__()[1] == empty.__tensor_flatten__()[1] == context
    assert context["requires_grad"] and real.requires_grad and empty.requires_grad and empty.is_leaf


@each_usage
@pytest.mark.parametrize("name", VARIANTS)
def test_writing_into_empty_gives_the_bytes_of_a_new_tensor(name: str, usage: tuple[bool, bool]) -> None:
    quantizer = VARIANTS[name].with_usage(*usage)
    for internal in (False, True):
        maker = quantizer.replace(internal=internal)
        for shape in SHAPES:
            x, empty = normal(shape, BF16), maker.make_empty(shape, dtype=BF16, device="cpu")
            for buffer in buffers(empty).values():
                buffer.fill_(77)  # padding must be written too
            fresh = quantize(maker, x)
            torch.manual_seed(3)
            assert maker.update_quantized(x, empty) is empty
            for key, buffer in buffers(fresh).items():
                assert torch.equal(buffers(empty)[key], buffer), key


@each_usage
@pytest.mark.parametrize("name", WITH_DELAYED)
def test_awkward_shapes(name: str, usage: tuple[bool, bool]) -> None:
    quantizer = WITH_DELAYED[name].with_usage(*usage)
    for shape in (*RAGGED_SHAPES, *EMPTY_SHAPES):
        if shape[-1] == 0 and isinstance(quantizer, nc.NVFP4Quantizer) and not quantizer.rowwise_usage:
            continue  # test_no_columns_column_wise
        x = normal(shape, BF16)
        tensor = quantize(quantizer, x)
        described = quantizer._describe_buffers(shape, BF16)
        assert {k: (tuple(b.shape), b.dtype) for k, b in buffers(tensor).items()} == described
        values = tensor.dequantize()
        assert values.shape == x.shape and values.dtype == BF16 and values.is_contiguous()
        error = (values.float() - x.float()).norm()
        assert error <= 0.2 * x.float().norm(), (shape, error)


def test_no_columns_column_wise() -> None:
    tensor = nc.NVFP4Quantizer(rowwise=False).quantize(torch.ones(7, 0))
    assert tensor.dequantize().shape == (7, 0)


@pytest.mark.parametrize("name", ["current", "delayed", "identity"])
def test_one_dimension_is_enough_for_per_tensor_formats(name: str) -> None:
    x = normal((50,), BF16)
    tensor = WITH_DELAYED[name].quantize(x)
    assert torch.allclose(tensor.dequantize().float(), x.float(), rtol=0.07, atol=0.02)
    assert WITH_DELAYED[name].get_columnwise_shape((50,)) == (50,)


def test_shapes_of_one_direction() -> None:
    shape = (3, 40, 96)
    for name, quantizer in ONE_OF_EACH.items():
        table = expected_buffers(name, quantizer, shape)
        columnwise = {"current": "_transpose", "identity": "_hp_data"}.get(name, "_columnwise_data")
        rowwise_only = quantizer.with_usage(columnwise=False)
        assert rowwise_only.get_columnwise_shape(shape) == table[columnwise][0]
        if name == "identity":
            continue
        for side, flag in (("rowwise", False), ("columnwise", True)):
            scale = "_scale_inv" if name == "current" else f"_{side}_scale_inv"
            assert rowwise_only.get_scale_shape(shape, flag) == table[scale][0]


class Undescribed(nc.Quantizer):
    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)


def test_a_quantizer_without_a_description_says_so() -> None:
    quantizer = Undescribed()
    for use in (
        lambda: quantizer._describe_buffers((4, 4)),
        lambda: quantizer.alloc_tensors((4, 4), device="cpu"),
        lambda: quantizer._storage_scalars(BF16),
        lambda: quantizer._resolve_storage_cls(),
        lambda: quantizer.replace(internal=True)._resolve_storage_cls(),
        lambda: quantizer._storage_metadata(BF16),
        lambda: quantizer.create_metadata((4, 4), dtype=BF16),
        lambda: quantizer.make_empty((4, 4), device="cpu"),
    ):
        with pytest.raises(NotImplementedError, match="Undescribed"):
            use()


class OtherOrder(nc.MXFP8Quantizer):
    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
        return dict(reversed(super()._describe_buffers(shape, dtype).items()))


def test_a_description_in_another_order_is_refused() -> None:
    """The buffers would change places: a description is in the order in which the storage is flattened."""
    with pytest.raises(
        RuntimeError, match=r"describes buffers \('_columnwise_scale_inv', .*MXFP8Tensor declares"
    ):
        OtherOrder(E4M3).make_empty((32, 32), device="cpu")


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "hybrid"])
@pytest.mark.parametrize("shape", [(64,), ()], ids=str)
def test_empty_tensors_have_the_shapes_that_are_quantized(name: str, shape: tuple[int, ...]) -> None:
    mixed = nc.HybridQuantizer(
        rowwise_quantizer=nc.Float8CurrentScalingQuantizer(E4M3), columnwise_quantizer=nc.MXFP8Quantizer(E4M3)
    )
    quantizer = ONE_OF_EACH.get(name, mixed)
    proto = nc.dynamo.TensorProto(shape, torch.float32, quantizer, device="cpu")
    uses = (
        lambda: quantizer.quantize(torch.ones(shape)),
        lambda: quantizer.make_empty(shape),
        proto.create_tensor,
    )
    if len(shape) >= quantizer._minimum_rank and name != "hybrid":
        assert {type(use()) for use in uses} == {type(quantizer)._tensor_class}
        return
    for use in uses:
        with pytest.raises(ValueError, match=r"needs at least [12] dims, got shape"):
            use()


def test_empty_tensors_need_a_direction() -> None:
    with pytest.raises(ValueError, match="both directions switched off"):
        nc.MXFP8Quantizer(E4M3).with_usage(False, False).make_empty((32, 32))


def test_one_description_in_two_spellings() -> None:
    for quantizer in ONE_OF_EACH.values():
        cls = type(quantizer)
        assert cls.inner_tensor_specs is cls._describe_buffers  # type: ignore[attr-defined]
        assert cls.storage_metadata is cls._storage_metadata


def test_a_class_that_overrides_one_spelling_overrides_both() -> None:
    class Old(nc.MXFP8Quantizer):
        def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = F32) -> dict:
            return {}

        def _storage_metadata(self, dtype: torch.dtype) -> tuple:
            return (type(self), {})

    class New(nc.MXFP8Quantizer):
        def inner_tensor_specs(self, shape: tuple[int, ...], dtype: torch.dtype = F32) -> dict:
            return {}

        def storage_metadata(self, dtype: torch.dtype) -> tuple:
            return (type(self), {})

    class Later(New):
        pass

    for cls in (Old, New, Later):
        quantizer = cls(E4M3)
        assert (
            cls.inner_tensor_specs is cls._describe_buffers and cls.storage_metadata is cls._storage_metadata
        )
        assert quantizer._describe_buffers((4, 4)) == quantizer.inner_tensor_specs((4, 4)) == {}
        assert quantizer.storage_metadata(BF16) == quantizer._storage_metadata(BF16) == (cls, {})


def test_construction_takes_torch_dtypes_and_integers() -> None:
    assert nc.MXFP8Quantizer(torch.float8_e4m3fn) == nc.MXFP8Quantizer(E4M3) == nc.MXFP8Quantizer(int(E4M3))  # type: ignore[arg-type]
    for bad, named in (
        (torch.float32, "kFloat32"),
        (nc.DType.kFloat4E2M1, "kFloat4E2M1"),
        (99, "99"),
        (torch.int8, "int8"),
    ):
        with pytest.raises(ValueError, match=named):
            nc.MXFP8Quantizer(bad)  # type: ignore[arg-type]
