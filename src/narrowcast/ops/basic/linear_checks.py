"""Checks of the functional forms of a linear layer, for tensors and for prototypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._checks import article, is_one_of, shape_of, shown
from ..._device import HIGH_PRECISION
from ...autograd.tensor_parallel import TensorParallel
from ...dynamo import TensorProto
from ...quantizers import Quantizer
from ...tensors import Float8TensorStorage, QuantizedTensorStorage

OVERRIDES = (None, "high_precision", "dequantized")


class Saved(NamedTuple):
    """The directions of an operand that the backward reads; both False if it does not read the operand."""

    rowwise: bool
    columnwise: bool


Given = tuple[str, Any, Quantizer | None, Saved]
"""Name of an operand, the tensor or its prototype, what quantizes it, what is read of it besides row-wise data."""


def kept_directions(
    override: str | None, input_requires_grad: bool, weight_requires_grad: bool
) -> tuple[Saved, Saved]:
    """Return the directions of input and weight that the backward reads.

    Raises:
        ValueError: another override.
    """
    if not is_one_of(override, OVERRIDES):
        raise ValueError(
            f"backward_override is {shown(override)}; use None, 'high_precision' or 'dequantized'"
        )
    rowwise, columnwise = override == "dequantized", override is None
    return (
        Saved(weight_requires_grad and rowwise, weight_requires_grad and columnwise),
        Saved(input_requires_grad and rowwise, input_requires_grad and columnwise),
    )


def check_forward(
    operands: tuple[Given, Given], quantized: bool, dtype: torch.dtype, parallel: TensorParallel, bias: Any
) -> None:
    """
    Raises:
        ValueError: shapes that do not fit, a missing quantizer or one that cannot be used alone, or a bias of a
            row-parallel layer.
        TypeError: a dtype that cannot be quantized, or a quantized input that would have to be gathered.
        RuntimeError: a quantized operand without a direction that is read.
    """
    inp, weight = operands[0][1], operands[1][1]
    if len(weight.shape) != 2:
        raise ValueError(f"weight has shape {shape_of(weight)}; it must be (out_features, in_features)")
    _check_features(inp, weight)
    if bias is not None and parallel.mode == "row":
        raise ValueError(
            "bias of a row-parallel layer comes behind the sum over processes; add it to the result"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias has shape {shape_of(bias)}; it must be ({weight.shape[0]},)")
    if parallel.gathers_input and is_quantized(inp):
        raise TypeError("a quantized input cannot be gathered; pass it in high precision")
    for name, tensor, quantizer, saved in operands:
        if is_quantized(tensor):
            _check_directions(name, tensor, True, quantized and saved.columnwise)
        elif quantized:
            _check_quantizer(name, quantizer, dtype)


def check_backward(
    wanted: tuple[bool, bool],
    quantized: bool,
    operands: tuple[Any, Any, Any],
    quantizers: tuple[Any, Any, Any],
    outs: tuple[tuple[Any, ...], tuple[Any, ...]],
    dtype: torch.dtype,
    parallel: TensorParallel,
    size: int,
) -> tuple[tuple[int, ...], tuple[int, int]] | None:
    """Return shapes of the gradients of input and weight; None if none is requested.

    Args:
        wanted: gradients of the input and of the weight.
        operands: gradient, input and weight.
        size: of the group.
        outs: of each gradient, what it is written to and how, as :func:`check_out` takes it.
    Raises:
        As :func:`check_forward` and :func:`check_out`, and ValueError for an operand that is missing.
    """
    grad, inp, weight = operands
    for needed, name, tensor in ((wanted[0], "weight", weight), (wanted[1], "input", inp)):
        if needed and tensor is None:
            raise ValueError(f"{name} is None, but a requested gradient reads it")
    if not any(wanted):
        return None
    if parallel.gathers_grad_output and is_quantized(grad):
        raise TypeError("a quantized grad_output cannot be gathered; pass it in high precision")
    _check_shapes(wanted, operands, parallel, size)
    read = (("grad_output", grad, wanted), ("input", inp, (False, True)), ("weight", weight, (False, True)))
    for (name, tensor, directions), quantizer, needed in zip(read, quantizers, (True, *wanted[::-1])):
        if quantized and needed and is_quantized(tensor):
            _check_directions(name, tensor, *directions)
        elif quantized and needed:
            _check_quantizer(name, quantizer, dtype)
    columns = (inp if weight is None else weight).shape[-1]
    shapes = parallel.grad_input_shape(grad.shape, columns, size), (grad.shape[-1], columns)
    for name, needed, (out, *how), shape in zip(("grad_input", "grad_weight"), wanted, outs, shapes):
        if needed:
            check_out(name, out, shape, *how)
    return shapes


def _check_shapes(
    wanted: tuple[bool, bool], operands: tuple[Any, Any, Any], parallel: TensorParallel, size: int
) -> None:
    grad, inp, weight = operands
    if wanted[0] and tuple(weight.shape[:-1]) != (grad.shape[-1],):
        raise ValueError(
            f"grad_output has shape {shape_of(grad)}; its last dim must be the first one of the weight, "
            f"{shape_of(weight)}"
        )
    if all(wanted):
        _check_features(inp, weight)
    if wanted[1]:
        gathered = parallel.gathers_input and not is_quantized(inp)
        rows = _rows(grad) * (size if parallel.gathers_grad_output else 1)
        if rows != _rows(inp) * (size if gathered else 1):
            raise ValueError(
                f"grad_output has shape {shape_of(grad)}, the input {shape_of(inp)}; they must have equally "
                "many rows"
            )


def _check_features(inp: Any, weight: Any) -> None:
    if inp.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"input has shape {shape_of(inp)}; its last dim must be that of the weight, {shape_of(weight)}"
        )


def check_out(
    name: str,
    out: Any,
    shape: tuple[int, ...],
    beta: float | None,
    accumulate: bool,
    quantizer: Quantizer | None,
) -> None:
    """
    Args:
        shape: of the result, which ``out`` takes.
    Raises:
        ValueError: a factor without accumulation or that without ``out``, an ``out`` of another kind, format or shape
            than the result, or a quantizer that cannot make one.
    """
    if beta is not None and not accumulate:
        raise ValueError(
            f"the factor of {name} is {beta}, but nothing is accumulated into {name}; leave it None"
        )
    if accumulate and out is None:
        raise ValueError(f"accumulating into {name} needs {name}")
    if out is None:
        if quantizer is not None:
            _check_alone(quantizer)
            if not any(quantizer.get_usages().values()):
                raise ValueError(f"{shown(quantizer)} has both directions switched off; ask for at least one")
        return
    storage = None if quantizer is None else quantizer._storage_class
    described: Any = out.quantizer if isinstance(out, TensorProto) else getattr(out, "_quantizer", None)
    theirs = described._storage_class if isinstance(out, TensorProto) and described else type(out)
    if is_quantized(out) != (storage is not None) or (
        storage is not None and not issubclass(theirs, storage)
    ):
        wanted = "a plain tensor" if storage is None else storage.__name__
        raise ValueError(f"{name} is {article(theirs.__name__)}, but its result is {wanted}")
    if accumulate and quantizer is not None:
        raise ValueError(f"a quantized {name} cannot be accumulated into")
    if quantizer is not None and described._layout() != quantizer._layout():
        raise ValueError(
            f"{name} is read with {described._layout()}, but is written with {quantizer._layout()}"
        )
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"the result has shape {tuple(shape)}, but {name} has {shape_of(out)}")


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor or a prototype is quantized."""
    return (
        tensor.is_quantized if isinstance(tensor, TensorProto) else isinstance(tensor, QuantizedTensorStorage)
    )


def _rows(tensor: Any) -> int:
    return torch.Size(tensor.shape[:-1]).numel()


def _check_quantizer(name: str, quantizer: Quantizer | None, dtype: torch.dtype) -> None:
    if quantizer is None:
        raise ValueError(f"with_quantized_compute=True needs {name}_quantizer, or {name} quantized already")
    _check_alone(quantizer)
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"cannot quantize {name} from {dtype}; use float32, bfloat16 or float16")


def _check_alone(quantizer: Quantizer) -> None:
    if quantizer._is_delayed():
        raise ValueError(
            f"{shown(quantizer)} needs the state of a layer; use Float8Quantizer(scale, amax, fp8_dtype)"
        )


def _check_directions(name: str, tensor: Any, rowwise: bool, columnwise: bool) -> None:
    if isinstance(tensor, TensorProto):
        assert tensor.quantizer is not None
        usages, storage = tensor.quantizer.get_usages(), tensor.quantizer._storage_class
    else:
        usages, storage = tensor.get_usages(), type(tensor)
    # per-tensor FP8 is transposed where the codes of the other direction are missing
    transposable = usages["rowwise"] and issubclass(storage, Float8TensorStorage)
    for direction, missing in (
        ("row-wise", rowwise and not usages["rowwise"]),
        ("column-wise", columnwise and not usages["columnwise"] and not transposable),
    ):
        if missing:
            raise RuntimeError(
                f"{name} is {article(storage.__name__)} without {direction} data, which is read here; quantize it "
                "in both directions"
            )
