"""Saving quantized tensors for a backward: buffers go through autograd, what describes them stays beside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .storage import QuantizedTensorStorage

TensorOrQuantized = Tensor | QuantizedTensorStorage


def prepare_for_saving(
    *tensors: TensorOrQuantized | None,
) -> tuple[list[Tensor | None], list[QuantizedTensorStorage | None]]:
    """Return plain tensors to save, and one object per input to restore them; the inputs stay unchanged."""
    flat: list[Tensor | None] = []
    objects: list[QuantizedTensorStorage | None] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            buffers, emptied = tensor.prepare_for_saving()
            flat.extend(buffers)
            objects.append(emptied)
        else:
            flat.append(tensor)
            objects.append(None)
    return flat, objects


def restore_from_saved(
    objects: list[QuantizedTensorStorage | None],
    saved_tensors: list[Tensor | None] | tuple[Tensor | None, ...],
    return_saved_tensors: bool = False,
) -> Any:
    """Invert :func:`prepare_for_saving`; each call builds new storages, so a graph may be walked twice."""
    restored: list[TensorOrQuantized | None] = []
    position = 0
    for emptied in objects:
        if emptied is None:
            restored.append(saved_tensors[position])
            position += 1
        else:
            storage = type(emptied)(
                quantizer=emptied._quantizer, fake_dtype=emptied._dtype, shape=emptied._shape
            )
            end = position + len(storage._FLATTEN_TENSOR_BUFFERS)
            storage.restore_from_saved(list(saved_tensors[position:end]))
            position = end
            restored.append(storage)
    return (restored, list(saved_tensors[position:])) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any) -> list[TensorOrQuantized | None]:
    """Return the tensors that ``prepare_for_saving`` put on an autograd context; another backward may follow.

    The context releases them, unless the graph is retained: each is freed as soon as the backward has used it.

    Raises:
        AttributeError: nothing was saved on this context.
    """
    return restore_from_saved(ctx.tensor_objects, saved_tensors(ctx))


def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """Return what was saved; the context lets go of it, unless the graph is retained, so that it is freed as it is
    used.

    Raises:
        RuntimeError: it was written since the forward.
    """
    if torch.compiler.is_compiling() or not isinstance(ctx, torch.autograd.function.BackwardCFunction):
        return ctx.saved_tensors  # type: ignore[no-any-return]
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
        shapes = dict.fromkeys(str(tuple(x.shape)) for x in leaves if isinstance(x, torch.nn.Parameter))
        layer = f"a layer with parameters of {' and '.join(shapes):.60}" if shapes else "a layer"
        raise RuntimeError(
            f"the weight, the input or the scale of {layer} was modified by an inplace operation between the forward "
            "and this backward, such as optimizer.step() or a renewal of scales; run the backward first"
        ) from error
    ctx.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
    return saved
