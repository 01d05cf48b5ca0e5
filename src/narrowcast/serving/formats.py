"""Layouts of quantized weights in other libraries' checkpoints, with their ``quantization_config``.

A linear layer's weight becomes a few tensors, named by what is put after the weight's key. Two dialects are in use:

- ``fp8``, DeepSeek's, which Transformers calls fine-grained FP8: ``weight`` in float8_e4m3fn and ``weight_scale_inv``,
  fp32, one per tile of 128 x 128, multiplied when decoding;
- ``compressed-tensors``, which vLLM and Transformers read: ``weight`` and ``weight_scale``, or for sub-byte codes
  ``weight_packed``; the scales' dtype and groups stand in the config.

Scale buffers are padded here for tensor cores; on disk they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _keywords
from ..formats import (
    E2M1,
    FLOAT8,
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_2D,
    FLOAT8_ROWS,
    MX_BLOCK,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    NVFP4_BLOCK,
    DType,
    Layout,
    cdiv,
)
from ..quantizers import Quantizer

Packed = dict[str, Tensor]
"""The tensors of a weight, by what is put after its name."""

Packer = Callable[[list[Tensor], tuple[int, int], Quantizer], Packed]


@dataclass(frozen=True)
class WeightFormat:
    """One quantized weight on disk.

    Args:
        layout: the record of the tensors it is made from.
        pack: (row-wise buffers, (N, K), quantizer) to tensors, by what their names add to the weight's key.
        multiple: what K must be a multiple of.
        arguments: of compressed-tensors' scheme for weights; none if it has no such scheme.
        activations: of its scheme for inputs, which are quantized when served; none if they stay as they are.
        name: compressed-tensors' name of the format.
        inputs: the record of the inputs that it is for; None for all others.
        static: inputs have the scale of delayed scaling, which is served beside the weight.
    """

    layout: Layout
    pack: Packer
    multiple: int
    name: str
    arguments: dict[str, Any]
    activations: dict[str, Any] | None
    inputs: Layout | None = None
    static: bool = False

    @property
    def granule(self) -> int:
        """Rows that share a row of scales."""
        return max(self.layout.scale_group[0], 1)

    def group(self, targets: list[str]) -> dict[str, Any]:
        """compressed-tensors' group that says how the weights of ``targets`` lie, and how inputs are rounded."""
        activations = None if self.activations is None else _scheme(self.activations, not self.static)
        return {
            "targets": targets,
            "format": self.name,
            "weights": _scheme(self.arguments, dynamic=False),
            "input_activations": activations,
        }


def is_codes(suffix: str) -> bool:
    """Return whether a weight's tensor with this name is its codes, not its scales."""
    return suffix in ("", "_packed")


def scale_extent(quantizer: Quantizer) -> tuple[tuple[int, int], bool]:
    """Return rows and columns that share a scale, and whether a scale follows from the amax of the whole matrix."""
    layout = quantizer._format_layout()
    rows, columns = layout.scale_group
    if getattr(quantizer, "with_2d_quantization", False):
        rows = columns = max(rows, columns)
    return (max(rows, 1), max(columns, 1)), layout is NVFP4 or layout is FLOAT8


def _scheme(arguments: dict[str, Any], dynamic: bool) -> dict[str, Any]:
    return {"type": "float", "symmetric": True, "dynamic": dynamic, **arguments}


def _one_byte_codes(buffers: list[Tensor], shape: tuple[int, int], quantizer: Quantizer) -> dict[str, Tensor]:
    codes, scale = buffers
    return {"": codes.view(torch.float8_e4m3fn), "_scale": _unpadded(scale, shape, quantizer)}


def _unpadded(scale: Tensor, shape: tuple[int, int], quantizer: Quantizer) -> Tensor:
    """Return the scales of a weight, without the padding that tensor cores want; (1,) if there is one scale."""
    rows, columns = quantizer._format_layout().scale_group
    if not columns and rows:
        return scale.view(shape[0], 1)
    return scale[: cdiv(shape[0], rows), : cdiv(shape[1], columns)] if rows else scale.reshape(1)


def _nvfp4(buffers: list[Tensor], shape: tuple[int, int], quantizer: Any) -> dict[str, Tensor]:
    """The second scale is stored as its reciprocal, so it rounds once more than here: within one unit of fp32.

    A matrix whose reciprocal is above the largest fp32 number, with an amax below 7.9e-36, is stored as zeros.
    """
    codes, scale, amax = buffers
    largest = quantizer.nvfp4_e4m3_max * E2M1.max
    scale = _unpadded(scale.view(torch.float8_e4m3fn), shape, quantizer)
    # a number divided by a tensor is its reciprocal times the number in PyTorch
    global_scale = torch.full_like(amax, largest) / amax
    vanishes = global_scale.isinf()
    codes, global_scale = torch.where(vanishes, 0, codes), torch.where(vanishes, 1.0, global_scale)
    return {"_packed": codes, "_scale": scale, "_global_scale": global_scale.reshape(1)}


def _packed(buffers: list[Tensor], shape: tuple[int, int], quantizer: Quantizer) -> dict[str, Tensor]:
    codes, scale = buffers
    return {"_packed": codes, "_scale": _unpadded(scale, shape, quantizer)}


_TOKEN, _TENSOR = ({"num_bits": 8, "strategy": strategy} for strategy in ("token", "tensor"))
_BLOCK = {"num_bits": 8, "strategy": "block", "block_structure": [FLOAT8_BLOCK, FLOAT8_BLOCK]}
_MX = {"num_bits": 8, "strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8"}
_MICRO = {"strategy": "tensor_group", "group_size": NVFP4_BLOCK, "scale_dtype": "torch.float8_e4m3fn"}

_PER_TENSOR = WeightFormat(FLOAT8, _one_byte_codes, 1, "float-quantized", _TENSOR, _TENSOR)
_PER_TENSOR_AND_TOKEN = replace(_PER_TENSOR, activations=_TOKEN, inputs=FLOAT8_ROWS)
_PER_ROW = replace(
    _PER_TENSOR, layout=FLOAT8_ROWS, arguments={"num_bits": 8, "strategy": "channel"}, activations=_TOKEN
)
_TILES = replace(
    _PER_TENSOR,
    layout=FLOAT8_BLOCK_2D,
    arguments=_BLOCK,
    activations={"num_bits": 8, "strategy": "group", "group_size": FLOAT8_BLOCK},
)
_STATIC = replace(_PER_TENSOR, static=True)
_MXFP8 = WeightFormat(MXFP8, _one_byte_codes, MX_BLOCK, "mxfp8-quantized", _MX, _MX)
# Inputs in NVFP4 would need the amax of calibration data; the weights alone need none.
_NVFP4 = WeightFormat(NVFP4, _nvfp4, NVFP4_BLOCK, "nvfp4-pack-quantized", {"num_bits": 4, **_MICRO}, None)
_MXFP4 = WeightFormat(MXFP4, _packed, MX_BLOCK, "mxfp4-pack-quantized", {**_MX, "num_bits": 4}, None)

_MXFP6 = WeightFormat(MXFP6, _packed, MX_BLOCK, "mxfp6-pack-quantized", {**_MX, "num_bits": 6}, None)

_HELD = (_PER_ROW, _PER_TENSOR_AND_TOKEN, _PER_TENSOR, _TILES, _MXFP8, _NVFP4, _MXFP6, _MXFP4)
"""What compressed-tensors holds; the first that fits is taken."""
WEIGHT_FORMATS = (*_HELD, _STATIC)
_ELEMENTS = (DType.kFloat8E4M3, DType.kFloat6E2M3, DType.kFloat4E2M1)


@dataclass(frozen=True)
class CheckpointFormat:
    """A format by the name that :func:`~narrowcast.export` takes.

    Args:
        weights: the formats of weights that it can hold; none for one in high precision.
        recipes: names of the recipes that train them, for messages.
        fine_grained: written in DeepSeek's dialect.
    """

    weights: tuple[WeightFormat, ...]
    recipes: str
    fine_grained: bool = False

    def weight_format(self, quantizer: Quantizer, inputs: Quantizer | None = None) -> WeightFormat | None:
        """Return how it holds the weights that a quantizer makes row-wise, for such inputs; None if it cannot."""
        if getattr(quantizer, "dtype", DType.kFloat8E4M3) not in _ELEMENTS:
            return None
        layouts = quantizer._format_layout(), None if inputs is None else inputs._format_layout()
        found = (one for one in self.weights if one.layout is layouts[0] and one.inputs in (None, layouts[1]))
        static = inputs is not None and inputs._is_delayed()
        return next((one for one in found if static or not one.static), None)


CHECKPOINT_FORMATS = {
    "hf-fp8-block128": CheckpointFormat((_TILES,), "Float8BlockScaling", fine_grained=True),
    "compressed-tensors": CheckpointFormat(
        _HELD,
        "Float8CurrentScaling, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, "
        "MXFP6BlockScaling, MXFP4BlockScaling",
    ),
    "mxfp8": CheckpointFormat((_MXFP8,), "MXFP8BlockScaling"),
    "nvfp4": CheckpointFormat((_NVFP4,), "NVFP4BlockScaling"),
    "mxfp6": CheckpointFormat((_MXFP6,), "MXFP6BlockScaling"),
    "mxfp4": CheckpointFormat((_MXFP4,), "MXFP4BlockScaling"),
    "fp8-static": CheckpointFormat((_STATIC,), "DelayedScaling"),
    "bf16": CheckpointFormat((), "any recipe"),
}
_keywords.CHOICES["format"] = tuple(CHECKPOINT_FORMATS)


def fine_grained_config(kept: list[str]) -> dict[str, Any]:
    """Return DeepSeek's ``quantization_config``; ``kept``: names of the linear layers in high precision."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK],
        "modules_to_not_convert": kept,
    }


def compressed_tensors_config(modules: dict[str, WeightFormat], kept: list[str]) -> dict[str, Any]:
    """compressed-tensors' ``quantization_config``; ``modules``: how the weight of each lies."""
    formats = [one for one in WEIGHT_FORMATS if any(one is used for used in modules.values())]
    groups = {}
    for index, one in enumerate(formats):
        names = [name for name, used in modules.items() if used is one]
        groups[f"group_{index}"] = one.group(["Linear"] if len(formats) == 1 else names)
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0].name if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": kept,
    }
