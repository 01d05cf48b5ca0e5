"""``weights``: a model's tensors as a server loads them, made one at a time from the weights that training reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from .._checks import is_one_of, not_among, shown
from .._device import HIGH_PRECISION
from ..convert.adapters import base_copy, has_adapters, layer_with_adapters, merged_later
from ..convert.stored import EXPORTED_AS
from ..distributed.together import ALONE, Together
from ..recipe import Recipe
from ..state import checked_recipe
from ..upstream.fsdp import reshard
from .checkpoint_tensors import CheckpointTensors
from .formats import CHECKPOINT_FORMATS
from .shards import groups_of


def weights(
    model: nn.Module,
    format: str,
    *,
    recipe: Recipe | str | None = None,
    dtype: torch.dtype | None = None,
    merge: Literal["kept", "new", "beside"] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over a model's tensors in a served format, for a server's ``load_weights``.

    Each quantized weight has the codes and scales that the training GEMMs read. Each pair is made when it is asked for:
    besides the model there are the tensors of one weight, and those that the caller keeps. :func:`narrowcast.export`
    writes the same pairs to files.

    Names and order are those of the model's checkpoint: of a model of Transformers the names that it was loaded from,
    such as ``model.layers.0.mlp.experts.7.gate_proj.weight`` for an expert; else those of the state dict. A tied tensor
    comes once, under its first name. Tied weights, transposed weights, and layers without a recipe come in high
    precision.

    Args:
        model: converted, or made of this library's layers; may be used while the iterator runs, but not trained.
        format: "hf-fp8-block128" (DeepSeek's), "compressed-tensors" (per tensor, 128 x 128, MXFP8, NVFP4 or MXFP4, by
            the recipe or as stored), "mxfp8", "nvfp4", "mxfp6" or "mxfp4" (compressed-tensors of this format),
            "fp8-static" (delayed scaling, with the scales of inputs), or "bf16" (no quantization).
        recipe: a recipe or its name; overrides the recipes of layers that have one.
        dtype: of tensors in high precision; default: unchanged, bf16 for "bf16".
        merge: of a PEFT model with LoRA adapters: "kept" or "new" yields the weights of the model that
            :func:`narrowcast.merge_adapters` returns with these ``scales``, each merged when it is asked for; "beside"
            those of the base, for an engine that loads ``peft.get_peft_model_state_dict(model)`` itself. The model
            stays as it is.

    Returns:
        pairs of a name and a tensor on the model's device. It may share the model's memory: copy it, do not write.

    Raises:
        TypeError: ``model`` is no module, or ``merge`` is given for a model without adapters.
        ValueError: as for :func:`narrowcast.export`.
    """
    _checks.module("model", model)
    base, sums = without_adapters(model, merge)
    return iter(checked(base, format, recipe, dtype, sums=sums))


def without_adapters(model: Any, merge: Any) -> tuple[nn.Module, dict[int, Callable[[], Any]]]:
    """Return the model to serve, which shares its tensors with ``model``, and its sums with adapters.

    Raises:
        TypeError, ValueError: as for :func:`narrowcast.export`.
    """
    if not is_one_of(merge, (None, "kept", "new", "beside")):
        raise ValueError(f"merge is {shown(merge)}; use 'kept', 'new' or 'beside'")
    if merge is None:
        if has_adapters(model):
            raise ValueError(
                "the model has adapters of PEFT; say with merge='kept', 'new' or 'beside' how to serve them"
            )
        return model, {}
    return (base_copy(model), {}) if merge == "beside" else merged_later(model, merge)


def together_of(model: nn.Module) -> Together:
    """Return the processes that share a model's parameters; all of them call this."""
    reshard(model)
    return Together(groups_of(model))


def checked(
    model: nn.Module,
    format: str,
    recipe: Recipe | str | None,
    dtype: torch.dtype | None,
    together: Together = ALONE,
    sums: Mapping[int, Callable[[], Any]] = MappingProxyType({}),
) -> CheckpointTensors:
    """Return the served tensors of a model.

    Args:
        together: the processes that make them together, and end together if one cannot; else each ends alone.
        sums: by the id of a parameter, what makes the values that are served in place of its own.
    Raises:
        TypeError, ValueError: as for :func:`weights`.
    """
    _checks.module("model", model)
    reshard(model)
    adapted = layer_with_adapters(model)
    if adapted is not None:
        raise ValueError(
            f"{shown(adapted)} has adapters of PEFT, under whose names no server finds its weight; pass "
            "the PEFT model with merge='kept', or call narrowcast.merge_adapters(model) first"
        )
    local = next((name for name, module in model.named_modules() if vars(module).get("_local_experts")), None)
    if local is not None:
        raise ValueError(
            f"{shown(local)} holds this rank's experts beside MoEDispatch, and no rank has the others; save with "
            "narrowcast.distributed.save_checkpoint, load into a model of all experts, and export that"
        )
    if not isinstance(format, str) or format not in CHECKPOINT_FORMATS:
        if is_one_of(format, EXPORTED_AS):
            use = shown(EXPORTED_AS[format])
            raise ValueError(
                f"format is {shown(format)}, a word for weights= of narrowcast.convert; use {use}"
            )
        raise ValueError(f"format is {not_among(format, CHECKPOINT_FORMATS)}")
    if dtype is not None and not is_one_of(dtype, HIGH_PRECISION):
        raise ValueError(
            f"dtype is {shown(dtype)}; leave it out, or use torch.bfloat16, torch.float16 or torch.float32"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {shown(name)} is on the meta device and has no values to export")
    return CheckpointTensors(model, format, checked_recipe(recipe, "export"), dtype, together, sums)
