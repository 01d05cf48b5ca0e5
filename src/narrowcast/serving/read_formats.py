"""``read_format``: the names, checks and buffers of quantized weights in other libraries' checkpoints.

A ``quantization_config`` selects one :class:`ReadFormat`. compressed-tensors writes ``weight_packed``, ``weight_scale``
and, for NVFP4, the reciprocal ``weight_global_scale``; ModelOpt writes ``weight``, ``weight_scale`` and, for NVFP4,
``weight_scale_2``; DeepSeek writes ``weight`` and ``weight_scale_inv``. Scales of inputs are not read: the recipe
scales inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from ..convert.stored import DECODED, FOUR_BITS, stored_quantizer
from ..dynamo import TensorProto
from ..formats import (
    E2M1,
    E8M0,
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_2D,
    FLOAT8_BLOCK_SCALE_ALIGNMENT,
    SCALE_TILE_COLUMNS,
    SCALE_TILE_ROWS,
    cdiv,
    round_up,
)
from ..recipe import Float8BlockScaling, Float8CurrentScaling, Recipe, recipe_name

Buffers = Callable[["ReadFormat", str, dict[str, Tensor], tuple[int, int]], list[Tensor]]

NVFP4_LARGEST = E2M1.max * 448.0
"""What NVFP4 maps the amax of a tensor to: the largest code times the largest scale of a block."""


@dataclass(frozen=True)
class ReadFormat:
    """Quantized weights of a checkpoint.

    Args:
        weights: how the layer stores them, as :func:`narrowcast.convert` takes it.
        dtype: of the codes.
        codes: what the name of the codes adds to the weight's.
        scales: what the names of its scales add.
        inputs: names beside the weight of scales for the layer's input or for a KV cache; they are left out.
        buffers: returns row-wise buffers of a weight (N, K), given its name and its tensors by what their names add.
        recipe: the default of the layers.
        tiles: codes of eight bits have a scale per 128 x 128.
    """

    weights: str
    dtype: torch.dtype
    codes: str
    scales: tuple[str, ...]
    inputs: tuple[str, ...]
    buffers: Buffers
    recipe: type[Recipe]
    tiles: bool = False

    def keys(self, tensors: dict[str, Tensor]) -> list[str]:
        """Return names of the weights, without what their codes add."""
        ending = "weight" + self.codes
        known = [key for key, value in tensors.items() if value.dtype == self.dtype]
        if self.weights in FOUR_BITS:  # bytes of other tensors are no codes
            known = [key for key in known if key.endswith(ending)]
        return [key.removesuffix(self.codes) for key in known]

    def take(self, key: str, tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
        """Return the tensors of a weight by what their names add, which ``tensors`` loses; ``path``: of the checkpoint.

        Raises:
            ValueError: a scale is missing.
        """
        for suffix in self.scales:
            if key + suffix not in tensors:
                raise ValueError(
                    f"{path} has {shown(key)} in {self.name} without its scale {shown(key + suffix)}; copy "
                    "the checkpoint again, with all of its files"
                )
        for name in self.inputs:
            tensors.pop(key.removesuffix("weight") + name, None)
        return {suffix: tensors.pop(key + suffix) for suffix in (self.codes, *self.scales)}

    @property
    def name(self) -> str:
        """The format, for messages."""
        return "FP8" if self.weights == "stored" else self.weights.upper()

    def _with_zeros(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a weight; zeros and ones for those of an all-zero weight.

        ModelOpt divides by its amax, 0: such a weight has a last scale of 0, and NaN in all codes or scales before it.
        """
        *before, final = self.scales
        last, divided = found[final], found[before[0] if before else self.codes]
        if last.numel() != 1 or last.item() != 0 or not divided.is_floating_point():
            return found
        if not divided.float().isnan().all():
            return found
        zeros = {name: value.clone() for name, value in found.items() if value is not last}
        for value in zeros.values():
            value.view(torch.uint8).zero_()
        return zeros | {final: torch.ones_like(last)}

    def assemble(
        self, key: str, found: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, recipe: Recipe
    ) -> Any:
        """Return the quantized weight (N, K), with memory of its own; ``found``: as :meth:`take` returns it.

        Raises:
            ValueError: another shape, another format than the recipe's, or scales that are no positive numbers.
        """
        quantizer = stored_quantizer(recipe, key.removesuffix(".weight"), self.weights)
        if self.weights == "stored" and (quantizer._format_layout() is FLOAT8_BLOCK_2D) != self.tiles:
            wanted = "Float8BlockScaling" if self.tiles else "Float8CurrentScaling or DelayedScaling"
            raise ValueError(
                f"recipe is {recipe_name(recipe)}, and the checkpoint's weights are those of {wanted}"
            )
        buffers = self.buffers(self, key, self._with_zeros(found), shape)
        return TensorProto(shape, dtype, quantizer).assemble(buffers)


def _check_shape(label: str, found: Tensor, expected: list[int]) -> None:
    if list(found.shape) != expected:
        raise ValueError(f"{label} are {tuple(found.shape)}, of which there are {expected}")


def _check_numbers(key: str, scale: Tensor, wrong: Tensor) -> None:
    if wrong.any():
        raise ValueError(
            f"the scales of {shown(key)} hold {scale[wrong][0].item()}; they must be finite and positive, so the "
            "file is damaged or of another format"
        )


def _eight_bits(fmt: ReadFormat, key: str, found: dict[str, Tensor], shape: tuple[int, int]) -> list[Tensor]:
    scale = found[fmt.scales[0]]
    if not scale.is_floating_point():
        raise ValueError(f"the scales of {shown(key)} are {scale.dtype}; floating point is read")
    if fmt.tiles:
        expected = [cdiv(size, FLOAT8_BLOCK) for size in shape]
        if list(scale.shape) != expected:
            raise ValueError(
                f"the scales of {shown(key)} are {tuple(scale.shape)}, and a weight of {shape} has {expected} tiles of "
                "128 x 128, which are read; the file is damaged or has other tiles"
            )
    elif scale.numel() != 1:
        raise ValueError(f"the scales of {shown(key)} are {tuple(scale.shape)}; one scale per tensor is read")
    scale = scale.to(torch.float32, copy=True)
    _check_numbers(key, scale, ~(scale.isfinite() & (scale > 0)))
    if fmt.tiles:
        padding = round_up(scale.shape[1], FLOAT8_BLOCK_SCALE_ALIGNMENT) - scale.shape[1]
        scale = torch.nn.functional.pad(scale, (0, padding))
    return [found[fmt.codes].view(torch.uint8).clone(), scale if fmt.tiles else scale.reshape(1)]


def _blocks(fmt: ReadFormat, key: str, found: dict[str, Tensor], shape: tuple[int, int]) -> list[Tensor]:
    """Return codes as they are on disk, and the scales of blocks padded as tensor cores read them."""
    block = DECODED[fmt.weights]._format_layout().scale_group[1]
    if shape[1] % block:
        raise ValueError(f"{shown(key)} is {shape}, and {fmt.name} is read in multiples of {block} columns")
    codes, scale = found[fmt.codes], found[fmt.scales[0]]
    if fmt.weights in FOUR_BITS:
        _check_shape(f"the codes of {shown(key)}", codes, [shape[0], shape[1] // 2])
    _check_shape(f"the scales of {shown(key)}", scale, [shape[0], shape[1] // block])
    nvfp4 = fmt.weights == "nvfp4"
    if scale.dtype not in ((torch.float8_e4m3fn,) if nvfp4 else (torch.uint8, torch.float8_e8m0fnu)):
        raise ValueError(
            f"the scales of {shown(key)} are {scale.dtype}; {fmt.name} has {_SCALE_DTYPES[fmt.weights]}"
        )
    if nvfp4:
        wrong = scale.float()
        _check_numbers(key, wrong, ~(wrong >= 0))  # a block of zeros may have a scale of 0
    scale = scale.view(torch.uint8)
    if not nvfp4:
        _check_numbers(key, scale, scale == E8M0.nan_code)
    padding = (0, -scale.shape[1] % SCALE_TILE_COLUMNS, 0, -scale.shape[0] % SCALE_TILE_ROWS)
    buffers = [codes.view(torch.uint8).clone(), torch.nn.functional.pad(scale, padding).clone()]
    return [*buffers, _amax(fmt, key, found[fmt.scales[1]])] if nvfp4 else buffers


_E8M0 = "uint8, codes of E8M0"
_SCALE_DTYPES = {"nvfp4": "float8_e4m3fn", "mxfp4": _E8M0, "mxfp8": _E8M0}


def _amax(fmt: ReadFormat, key: str, second: Tensor) -> Tensor:
    """Return the amax that a tensor's second scale stands for, fp32 (1,): within one unit of fp32."""
    if second.numel() != 1 or not second.is_floating_point():
        raise ValueError(
            f"{shown(key + fmt.scales[1])} is {second.dtype} of {tuple(second.shape)}; one floating-point scale is "
            "read"
        )
    second = second.to(torch.float32, copy=True).reshape(1)
    _check_numbers(key, second, ~(second.isfinite() & (second > 0)))
    return NVFP4_LARGEST / second if fmt.scales[1] == "_global_scale" else second * NVFP4_LARGEST


_INPUTS = ("input_scale", "k_scale", "v_scale")
_PER_TENSOR = ReadFormat(
    "stored", torch.float8_e4m3fn, "", ("_scale",), _INPUTS, _eight_bits, Float8CurrentScaling
)
_TILES = replace(_PER_TENSOR, recipe=Float8BlockScaling, tiles=True)
_DEEPSEEK = replace(_TILES, scales=("_scale_inv",))
_NVFP4 = ReadFormat(
    "nvfp4",
    torch.uint8,
    "_packed",
    ("_scale", "_global_scale"),
    ("input_global_scale",),
    _blocks,
    Float8CurrentScaling,
)
# under Float8BlockScaling most of its values are exact
_MXFP4 = replace(_NVFP4, weights="mxfp4", scales=("_scale",), recipe=Float8BlockScaling)
_MXFP8 = replace(_MXFP4, weights="mxfp8", dtype=torch.float8_e4m3fn, codes="")
_MODELOPT = {
    "FP8": _PER_TENSOR,
    "NVFP4": replace(_NVFP4, codes="", scales=("_scale", "_scale_2"), inputs=_INPUTS),
    "MXFP4": replace(_MXFP4, codes="", inputs=_INPUTS),
    "MXFP8": replace(_MXFP8, inputs=_INPUTS),
}
_MODELOPT |= {"W4A16_NVFP4": _MODELOPT["NVFP4"], "W4A8_MXFP4_FP8": _MODELOPT["MXFP4"]}


def read_format(config: Any) -> ReadFormat:
    """Return how to read the weights of a checkpoint with this ``quantization_config``.

    Raises:
        ValueError: no recipe reads such weights, or it is none.
    """
    found = config if isinstance(config, dict) else {}
    method, tile = found.get("quant_method"), [FLOAT8_BLOCK, FLOAT8_BLOCK]
    if method == "fp8" and found.get("weight_block_size") == tile:
        return _DEEPSEEK
    # ModelOpt writes "mxfp4", and its other names in capitals
    algorithm = str(found.get("quant_algo")).upper()
    if method == "modelopt" and algorithm in _MODELOPT:
        return _MODELOPT[algorithm]
    if method == "compressed-tensors":
        groups = found.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        schemes = [group.get("weights") if isinstance(group, dict) else None for group in groups]
        known = _compressed(found.get("format"), [one if isinstance(one, dict) else {} for one in schemes])
        if known is not None:
            return known
    told = {name: found[name] for name in ("quant_method", "quant_algo", "format") if name in found} or config
    raise ValueError(
        f"the checkpoint's quantization_config is {shown(told)}; load_quantized reads FP8 with 128 x 128 tiles "
        "(quant_method 'fp8', compressed-tensors) or one scale per tensor (compressed-tensors, ModelOpt), their "
        "NVFP4, MXFP4 and MXFP8"
    )


def _compressed(format: Any, schemes: list[dict[str, Any]]) -> ReadFormat | None:
    """Return how to read compressed-tensors' weights with these schemes; None if it is not known."""
    tile = [FLOAT8_BLOCK, FLOAT8_BLOCK]

    def all_have(**wanted: Any) -> bool:
        return bool(schemes) and all(
            one.get(name) == value for one in schemes for name, value in wanted.items()
        )

    if format in ("float-quantized", "naive-quantized"):
        if all_have(num_bits=8, strategy="tensor"):
            return _PER_TENSOR
        if all_have(strategy="block", block_structure=tile):
            return _TILES
    if format == "nvfp4-pack-quantized" and all_have(num_bits=4, group_size=16):
        return _NVFP4
    if format == "mxfp8-quantized" and all_have(num_bits=8, group_size=32):
        return _MXFP8
    if format == "mxfp4-pack-quantized" and all_have(num_bits=4, group_size=32):
        return _MXFP4
    return None
