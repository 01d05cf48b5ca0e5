"""HybridQuantizer: each direction is its own quantizer's work, as a value, in tensors, in layers and compiled."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import pytest
import torch
from recipes import E4M3, E5M2

import narrowcast as nc
from narrowcast.quantizers import DelayedFloat8Quantizer
from narrowcast.quantizers.hybrid import EagerHybridQuantizer
from narrowcast.tensors import HybridQuantizedTensor


def halves() -> dict[str, tuple[nc.Quantizer, nc.Quantizer]]:
    return {
        "mxfp8+nvfp4": (nc.MXFP8Quantizer(E4M3), nc.NVFP4Quantizer(with_rht=True)),
        "nvfp4+current": (nc.NVFP4Quantizer(), nc.Float8CurrentScalingQuantizer(E5M2)),
        "block+identity": (
            nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
            nc.IdentityQuantizer(),
        ),
    }


def hybrid(name: str, **options: str) -> nc.HybridQuantizer:
    row, column = halves()[name]
    return nc.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, **options)


@pytest.mark.parametrize("name", halves())
@pytest.mark.parametrize("shape", [(32, 64), (7, 5), (3, 5, 40)], ids=str)
def test_each_direction_is_its_own_quantizers_work(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).bfloat16()
    row, column = halves()[name]
    made = hybrid(name).quantize(x)
    expected_row = row.with_usage(rowwise=True, columnwise=False).replace(internal=True).quantize(x)
    expected_column = column.with_usage(rowwise=False, columnwise=True).replace(internal=True).quantize(x)
    for ours, theirs in (
        (made.rowwise_operand(), expected_row.rowwise_operand()),
        (made.columnwise_operand(), expected_column.columnwise_operand()),
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
        assert all(t.numel() == 0 for t in ours[len(theirs) :])
    described = hybrid(name)._describe_buffers(shape, torch.bfloat16)
    assert list(described) == [attribute for attribute, _ in made._FLATTEN_TENSOR_BUFFERS]
    for attribute, (size, dtype) in described.items():
        buffer = getattr(made, attribute)
        assert (tuple(buffer.shape), buffer.dtype) == (tuple(size), dtype)
    assert torch.equal(made.dequantize(), expected_row.dequantize())
    made.update_usage(rowwise_usage=False)
    assert torch.equal(made.dequantize(), expected_column.dequantize())


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
@pytest.mark.parametrize("name", halves())
@pytest.mark.parametrize("shape", [(32, 64), (7, 5), (3, 5, 40)], ids=str)
def test_the_halves_are_storages_of_their_own_formats(
    name: str, shape: tuple[int, ...], internal: bool
) -> None:
    x = torch.randn(shape).bfloat16()
    row, column = halves()[name]
    made: Any = hybrid(name).replace(internal=internal).quantize(x)
    for ours, quantizer, columnwise in (
        (made.rowwise_sub_storage, row, False),
        (made.columnwise_sub_storage, column, True),
    ):
        alone = quantizer.with_usage(not columnwise, columnwise).replace(internal=internal).quantize(x)
        assert type(ours) is type(alone) and ours.size() == x.shape and ours.dtype == x.dtype
        for a, b in zip(ours.get_data_tensors(), alone.get_data_tensors(), strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
        assert torch.equal(ours.dequantize(), alone.dequantize())
        held = made.columnwise_operand() if columnwise else made.rowwise_operand()
        assert any(buffer is held[0] for buffer in ours.get_data_tensors())


def test_halves_are_the_same_objects_until_they_are_dropped() -> None:
    made: Any = hybrid("mxfp8+nvfp4").quantize(torch.randn(32, 64))
    row, column = made.rowwise_sub_storage, made.columnwise_sub_storage
    made.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert made.rowwise_sub_storage is row and made.columnwise_sub_storage is column
    again: Any = hybrid("mxfp8+nvfp4").quantize(torch.ones(32, 64))
    made.copy_from_storage(again)
    assert torch.equal(made.rowwise_sub_storage.dequantize(), torch.ones(32, 64))
    assert "rowwise=MXFP8Tensor, columnwise=NVFP4Tensor" in repr(made)
    copied = copy.deepcopy(made)
    made.update_usage(rowwise_usage=False)
    assert made.rowwise_sub_storage is None and made.columnwise_sub_storage is column
    assert "rowwise=None, columnwise=NVFP4Tensor" in repr(made)
    gone = weakref.ref(row)
    del row
    assert gone() is None  # nothing keeps what was dropped
    made.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert made.get_usages() == {"rowwise": False, "columnwise": False}
    assert "rowwise=None, columnwise=None" in repr(made)
    assert copied.rowwise_sub_storage is not None and copied.columnwise_sub_storage is not column


@pytest.mark.parametrize("kept", ["both", "rowwise", "columnwise"])
@pytest.mark.parametrize("name", halves())
def test_a_hybrid_of_halves_that_are_there(name: str, kept: str) -> None:
    x = torch.randn(32, 64).bfloat16()
    quantizer, made = hybrid(name), hybrid(name).quantize(x)
    given: dict[str, Any] = {
        "rowwise_storage": None if kept == "columnwise" else made.rowwise_sub_storage,
        "columnwise_storage": None if kept == "rowwise" else made.columnwise_sub_storage,
        "quantizer": quantizer,
    }
    tensor = nc.HybridQuantizedTensor(shape=(32, 64), dtype=x.dtype, device=x.device, **given)
    storage = nc.HybridQuantizedTensorStorage(fake_dtype=x.dtype, **given)
    if kept != "both":
        made.update_usage(**{("rowwise" if kept == "columnwise" else "columnwise") + "_usage": False})
    assert tensor.shape == storage.size() == x.shape and tensor.dtype == storage.dtype == x.dtype
    assert tensor.get_usages() == storage.get_usages() == made.get_usages()
    assert torch.equal(tensor.dequantize(), made.dequantize())
    assert torch.equal(storage.dequantize(), made.dequantize())
    with pytest.raises(TypeError, match="pass the HybridQuantizer"):
        nc.HybridQuantizedTensorStorage(**{**given, "quantizer": None})


PARTS = {
    "rows": lambda t: t[64:128],
    "columns": lambda t: t[:, 128:],
    "split": lambda t: torch.split(t, 64)[1],
    "view": lambda t: t.view(2, 64, 256),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", halves())
def test_parts_stay_hybrids(name: str, part: str) -> None:
    """Where both halves' blocks end: with the parts of the halves, for reading."""
    whole: Any = hybrid(name).quantize(torch.randn(128, 256).bfloat16())
    expected = PARTS[part](whole.dequantize())
    piece = PARTS[part](whole)
    assert isinstance(piece, nc.HybridQuantizedTensor) and piece.shape == expected.shape
    assert torch.equal(piece.dequantize(), expected)
    column = PARTS[part](whole.columnwise_sub_storage.dequantize())
    assert torch.equal(piece.columnwise_sub_storage.dequantize(), column)
    assert type(piece.rowwise_sub_storage) is type(whole.rowwise_sub_storage)
    if part != "view":
        for written in (piece, piece.rowwise_sub_storage):
            with pytest.raises(RuntimeError, match="writes through a view"):
                written.fill_(1)
    whole.update_usage(rowwise_usage=False)
    rest = PARTS[part](whole)
    assert rest.rowwise_sub_storage is None and torch.equal(rest.dequantize(), column)


def test_parts_within_a_block_are_plain_values() -> None:
    whole: Any = hybrid("block+identity").quantize(torch.randn(256, 256).bfloat16())
    assert not isinstance(whole[:, 5:200], nc.HybridQuantizedTensor)
    assert torch.equal(whole[:, 5:200].clone(), whole.dequantize()[:, 5:200])


def test_the_second_may_quantize_what_the_first_made() -> None:
    x = torch.randn(32, 64).bfloat16()
    row, column = halves()["nvfp4+current"]
    made = hybrid("nvfp4+current", columnwise_source="rowwise_dequantized").quantize(x)
    seen = row.with_usage(columnwise=False).quantize(x).dequantize()
    expected = column.with_usage(rowwise=False).replace(internal=True).quantize(seen)
    assert torch.equal(made.columnwise_operand()[0], expected.columnwise_operand()[0])


def test_value_semantics() -> None:
    one, two = hybrid("mxfp8+nvfp4"), hybrid("mxfp8+nvfp4")
    assert one == two and hash(one) == hash(two) and one is not two
    assert one != hybrid("nvfp4+current") and one != one.with_usage(columnwise=False)
    expression, names = one.__fx_repr__()
    rebuilt = eval(expression, names)
    assert rebuilt == one and rebuilt is not one
    x = torch.randn(32, 64).bfloat16()
    for a, b in zip(rebuilt.quantize(x).get_data_tensors(), one.quantize(x).get_data_tensors()):
        assert torch.equal(a, b)


def test_its_halves_cannot_be_changed() -> None:
    made = hybrid("mxfp8+nvfp4")
    for half in (made.rowwise_quantizer, made.columnwise_quantizer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            half.with_2d_quantization = True


def test_only_a_half_that_rounds_at_random_takes_a_seed() -> None:
    x, options = torch.randn(32, 64).bfloat16(), {"with_rht": True, "stochastic_rounding": True}
    for row, column in ((nc.MXFP8Quantizer(E4M3), nc.NVFP4Quantizer(**options)), halves()["mxfp8+nvfp4"]):
        torch.manual_seed(3)
        made = nc.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column).quantize(x)
        torch.manual_seed(3)
        alone = column.with_usage(rowwise=False, columnwise=True).quantize(x)
        assert torch.equal(made.columnwise_operand()[0], alone.columnwise_operand()[0])


def test_refuses_what_is_no_pair_of_values() -> None:
    row, column = halves()["mxfp8+nvfp4"]
    with pytest.raises(ValueError, match="one object"):
        nc.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=row)
    with pytest.raises(ValueError, match="columnwise_source is 'x'"):
        nc.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source="x")
    with pytest.raises(TypeError, match="one that holds its state: Float8Quantizer"):
        nc.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=DelayedFloat8Quantizer(E4M3, 0))


def test_a_half_with_delayed_scaling() -> None:
    x, scale, amax = torch.randn(32, 64).bfloat16(), torch.full((1,), 2.0), torch.zeros(1)
    delayed = nc.Float8Quantizer(scale, amax, E4M3)
    made = nc.HybridQuantizer(rowwise_quantizer=delayed, columnwise_quantizer=nc.MXFP8Quantizer(E4M3))
    assert torch.equal(made.quantize(x).dequantize(), delayed.quantize(x).dequantize())
    assert amax == x.abs().max()
    layer = nc.Linear(64, 32, device="cpu", dtype=torch.bfloat16)
    amax.zero_()
    recipe = nc.recipe.CustomRecipe(
        qfactory=lambda role: made if role.tensor_type == "input" else nc.MXFP8Quantizer(E4M3)
    )
    with nc.autocast(recipe=recipe):
        layer(x.requires_grad_()).sum().backward()
    assert amax == x.abs().max() and x.grad is not None


class Halving(nc.Float8CurrentScalingQuantizer):
    """A user's class, not registered as a value."""

    def _encode(self, numerics: Any, x: torch.Tensor, seed: torch.Tensor | None) -> list[torch.Tensor]:
        return super()._encode(numerics, x / 2, seed)


def test_a_half_that_is_no_value_works_in_eager_code() -> None:
    x = torch.randn(32, 64).bfloat16()
    made = nc.HybridQuantizer(rowwise_quantizer=Halving(E4M3), columnwise_quantizer=nc.NVFP4Quantizer())
    assert type(made) is EagerHybridQuantizer and type(hybrid("mxfp8+nvfp4")) is nc.HybridQuantizer
    assert not nc.dynamo.is_value_opaque_quantizer(made) and type(made)._value_fields() is None
    tensor = made.quantize(x)
    assert isinstance(tensor, HybridQuantizedTensor)
    assert torch.equal(tensor.dequantize(), Halving(E4M3).quantize(x).dequantize())
    rows = made.with_usage(columnwise=False)
    for copied in (made.copy(), copy.deepcopy(made), made.replace(columnwise_source="rowwise_dequantized")):
        assert copied != made
        assert torch.equal(copied.with_usage(columnwise=False).quantize(x).dequantize(), tensor.dequantize())
    empty = rows.make_empty((32, 64), dtype=torch.bfloat16, device="cpu")
    assert torch.equal(empty.copy_(x).dequantize(), tensor.dequantize())
    with pytest.raises(TypeError, match="register_value_opaque_quantizer"):
        made.__fx_repr__()
    columnwise = nc.HybridQuantizer(rowwise_quantizer=nc.NVFP4Quantizer(), columnwise_quantizer=Halving(E4M3))
    assert made._layout() != columnwise._layout()
    recipe = nc.recipe.CustomRecipe(
        qfactory=lambda role: made if "grad" not in role.tensor_type else Halving(E4M3)
    )
    layer = nc.Linear(64, 48, device="cpu", params_dtype=torch.bfloat16, recipe=recipe)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0


def factory(role: nc.QuantizerRole) -> nc.Quantizer:
    """MXFP8 forward; every backward GEMM multiplies current-scaled FP8."""
    backward = nc.Float8CurrentScalingQuantizer(E5M2 if role.tensor_type == "grad_output" else E4M3)
    if role.tensor_type == "grad_output":
        return backward
    return nc.HybridQuantizer(rowwise_quantizer=nc.MXFP8Quantizer(E4M3), columnwise_quantizer=backward)


@pytest.mark.parametrize("dynamic", [None, True])
def test_linear_compiled_equals_eager(dynamic: bool | None) -> None:
    layer = nc.Linear(48, 80, device="cpu", params_dtype=torch.bfloat16)
    recipe = nc.recipe.CustomRecipe(qfactory=factory)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (40, 24):
        x = torch.randn(tokens, 48).bfloat16().requires_grad_(True)
        results = []
        for forward in (layer, compiled):
            with nc.autocast(recipe=recipe):
                y = forward(x)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), (x, layer.weight))])
        assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*results))
        exact = (2 * results[0][0].float()) @ layer.weight.float()
        assert (results[0][1].float() - exact).norm() < 0.1 * exact.norm()


def test_a_replaced_half_counts() -> None:
    one, new = hybrid("mxfp8+nvfp4"), nc.Float8CurrentScalingQuantizer(E4M3)
    made = one.replace(rowwise_quantizer=new)
    assert made == nc.HybridQuantizer(rowwise_quantizer=new, columnwise_quantizer=halves()["mxfp8+nvfp4"][1])
    assert made != one and type(made.rowwise_quantizer) is type(new)  # type: ignore[attr-defined]
    x = torch.randn(32, 64).bfloat16()
    assert torch.equal(made.quantize(x).dequantize(), new.quantize(x).dequantize())
    assert type(one.replace(columnwise_quantizer=new).columnwise_quantizer) is type(new)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="cannot be half of a hybrid"):
        one.replace(rowwise_quantizer="mxfp8")
    with pytest.raises(ValueError, match="columnwise_source is 'rows'"):
        one.replace(columnwise_source="rows")


def test_a_half_cannot_reduce() -> None:
    reducing = nc.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    with pytest.raises(ValueError, match="no process group; use with_amax_reduction=False"):
        nc.HybridQuantizer(rowwise_quantizer=reducing, columnwise_quantizer=nc.MXFP8Quantizer(E4M3))


def test_as_safe_to_requantize_as_its_halves() -> None:
    class Unsafe(nc.MXFP8Quantizer):
        def is_requantization_safe(self) -> bool:
            return False

    nc.dynamo.register_value_opaque_quantizer(Unsafe)
    element = nc.DType.kFloat8E4M3
    for row, column in ((nc.MXFP8Quantizer, Unsafe), (Unsafe, nc.MXFP8Quantizer)):
        hybrid = nc.HybridQuantizer(rowwise_quantizer=row(element), columnwise_quantizer=column(element))
        assert not hybrid.is_requantization_safe()
    both = [nc.MXFP8Quantizer(element) for _ in range(2)]
    assert nc.HybridQuantizer(
        rowwise_quantizer=both[0], columnwise_quantizer=both[1]
    ).is_requantization_safe()


def test_what_is_left_of_a_storage_is_printed() -> None:
    storage = hybrid("mxfp8+nvfp4").replace(internal=True).quantize(torch.randn(32, 64).bfloat16())
    assert "(shape=(32, 64), dtype=torch.bfloat16, rowwise=MXFP8TensorStorage, " in repr(storage)
    storage.update_usage(rowwise_usage=False)
    assert "(shape=(32, 64), dtype=torch.bfloat16, rowwise=None, columnwise=NVFP4" in repr(storage)
    storage.clear()
    assert "(dtype=torch.bfloat16, rowwise=None, columnwise=None)" in repr(storage)
    assert storage.get_data_tensors() == (None,) * len(storage._FLATTEN_TENSOR_BUFFERS)
