"""``LAYOUTS``: quantized weights in other libraries' checkpoints, and how each becomes a stored weight.

A record says what a ``quantization_config`` calls a layout, the names of its tensors, and what they become. The table
of ``docs/serving.md`` is made from the records. Scales of inputs are not read: the recipe scales inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from ..convert.stored import stored_quantizer
from ..dynamo import TensorProto
from ..formats import (
    E2M1,
    E8M0,
    FLOAT8,
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_2D,
    FLOAT8_BLOCK_SCALE_ALIGNMENT,
    FLOAT8_ROWS,
    MX_BLOCK,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    NVFP4_BLOCK,
    SCALE_TILE_COLUMNS,
    SCALE_TILE_ROWS,
    Layout,
    cdiv,
    round_up,
)
from ..recipe import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe, recipe_name

Buffers = Callable[["ReadFormat", str, dict[str, Tensor], tuple[int, int]], list[Tensor]]

NVFP4_LARGEST = E2M1.max * 448.0
"""What NVFP4 maps the amax of a tensor to: the largest code times the largest scale of a block."""

_BITS = {MXFP4: 4, NVFP4: 4, MXFP6: 6}
"""Bits of a code, of layouts that pack codes into bytes."""


@dataclass(frozen=True)
class ReadFormat:
    """Quantized weights of a checkpoint.

    Args:
        weights: how the layer stores them, as :func:`narrowcast.convert` takes it.
        layout: the record of the tensors that they become.
        dtype: of the codes.
        codes: what the name of the codes adds to the weight's.
        scales: what the names of its scales add; one that begins with a dot stands in place of ``weight``.
        inputs: names of scales for a layer's input or for a KV cache; they are left out.
        buffers: returns row-wise buffers of a weight (N, K), given its name and its tensors by what their names add.
        recipe: the default of the layers.
        stacked: all experts of a layer are one tensor, the codes of a block in its last dim.
    """

    weights: str
    layout: Layout
    dtype: torch.dtype
    codes: str
    scales: tuple[str, ...]
    inputs: tuple[str, ...]
    buffers: Buffers
    recipe: type[Recipe]
    stacked: bool = False

    def name_of(self, key: str, suffix: str) -> str:
        """Return the name of a tensor of the weight ``key``."""
        return key.removesuffix("weight") + suffix[1:] if suffix.startswith(".") else key + suffix

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of a weight's tensors, and of those that are left out."""
        return (*(self.name_of("weight", one) for one in (self.codes, *self.scales)), *self.inputs)

    def keys(self, tensors: dict[str, Tensor]) -> list[str]:
        """Return names of the weights, without what their codes add."""
        known = [key for key, value in tensors.items() if value.dtype == self.dtype]
        if self.dtype == torch.float8_e4m3fn:  # scales of NVFP4 have it, too
            return [key for key in known if not key.endswith("_scale")]
        # bytes of other tensors are no codes
        return [key.removesuffix(self.codes) for key in known if key.endswith(self.codes or "weight")]

    def shape_of(self, codes: Tensor) -> tuple[int, int]:
        """Return (N, K) of a weight with these codes, (0, 0) if they are no matrix."""
        if codes.dim() != 2:
            return 0, 0
        return codes.shape[0], codes.shape[1] * 8 // _BITS.get(self.layout, 8)

    def fits(self, key: str, tensors: dict[str, Tensor]) -> int:
        """Return how well a weight's tensors are those of this layout: 0 not, 1 by their names, 2 by sizes, too."""
        names = [self.name_of(key, suffix) for suffix in (self.codes, *self.scales)]
        if self.stacked:
            return 2 * all(name in tensors for name in names)
        if not all(name in tensors for name in names) or tensors[names[0]].dtype != self.dtype:
            return 0
        shape, scale = self.shape_of(tensors[names[0]]), tensors[names[1]]
        bytes_of_e8m0 = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        if self.layout is MXFP8 and not bytes_of_e8m0:
            return 1
        sizes = {tuple(size for size in of if size > 1) for of in (self.scale_shape(shape), scale.shape)}
        if self.layout is NVFP4:  # blocks may be longer
            return 2
        return 2 if len(sizes) == 1 else 1

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight (N, K)."""
        rows, columns = self.layout.scale_group
        if not rows:
            return ()
        return (cdiv(shape[0], rows), cdiv(shape[1], columns) if columns else 1)

    def take(self, key: str, tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
        """Return the tensors of a weight by what their names add, which ``tensors`` loses; ``path``: of the checkpoint.

        Raises:
            ValueError: a scale is missing, or what changes the layer's input is beside it.
        """
        for suffix in self.scales:
            if self.name_of(key, suffix) not in tensors:
                raise ValueError(
                    f"{path} has {shown(key)} in {self.name} without its scale {shown(self.name_of(key, suffix))}; "
                    "copy the checkpoint again, with all of its files"
                )
        owner = key.removesuffix("weight")
        for name in _CHANGES:
            if owner + name in tensors:
                raise ValueError(
                    f"{path} has {shown(owner + name)}, which changes the input or the output of a layer and which "
                    "load_quantized does not read; give a checkpoint without it"
                )
        return {suffix: tensors.pop(self.name_of(key, suffix)) for suffix in (self.codes, *self.scales)}

    @property
    def name(self) -> str:
        """The format, for messages."""
        return "FP8" if self.layout in _FLOAT8 else self.weights.upper()

    def _with_zeros(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a weight; zeros and ones for those of an all-zero weight or row.

        ModelOpt divides by its amax, 0: such a weight has a last scale of 0, and NaN in all codes or scales before it.
        """
        *before, final = self.scales
        last, divided = found[final], found[before[0] if before else self.codes]
        if not divided.is_floating_point() or divided.dim() != 2 or not last.is_floating_point():
            return found
        rows = (
            last.reshape(-1, 1).expand(divided.shape[0], 1) if last.numel() in (1, divided.shape[0]) else None
        )
        if rows is None or not bool((zero := rows.float() == 0).any()):
            return found
        if not bool((divided.float().isnan() | ~zero).all()):
            return found
        zeros = {name: value.clone() for name, value in found.items() if value is not last}
        for value in zeros.values():
            value.view(torch.uint8).masked_fill_(zero, 0)
        return zeros | {final: last.float().masked_fill(last.float() == 0, 1.0)}

    def decode(self, key: str, found: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the values of a weight (N, K), or of all experts of a layer, which no layer stores as codes."""
        codes, scale = found[self.codes], found[self.scales[0]]
        if self.stacked:  # (E, N, blocks, bytes), of a parameter (E, K, N)
            flat = {suffix: one.flatten(0, 1).flatten(1) for suffix, one in found.items()}
            values = self._values(key, flat, dtype).view(*codes.shape[:2], -1)
            return values.transpose(1, 2).contiguous()
        if codes.dim() == 3 and all(len(one) == len(codes) for one in found.values() if one.dim()):
            return torch.stack(
                [
                    self.decode(key, {suffix: one[i] for suffix, one in found.items()}, dtype)
                    for i in range(len(codes))
                ]
            )
        if self.layout is FLOAT8_ROWS and scale.dim() == 2 and len(scale) == 1 < len(codes):  # (K, N)
            return self._values(key, {suffix: one.t() for suffix, one in found.items()}, dtype).t()
        return self._values(key, found, dtype)

    def _values(self, key: str, found: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight = self.assemble(key, found, self.shape_of(found[self.codes]), dtype, self.recipe())
        return weight.dequantize()  # type: ignore[no-any-return]

    def experts(self, found: dict[str, Tensor], transposed: bool) -> list[dict[str, Tensor]]:
        """Return the tensors of each expert's matrix (N, K), from those of all experts of a layer, (E, K, N) if
        ``transposed``.

        None of them if the scales are of blocks of a column, or not one by one.
        """
        codes, scale = found[self.codes], found[self.scales[0]]
        if self.stacked:  # (E, N, blocks, bytes)
            return [{suffix: one[i].flatten(1) for suffix, one in found.items()} for i in range(len(codes))]
        if codes.dim() != 3 or any(len(one) != len(codes) for one in found.values() if one.dim()):
            return []
        by_column = self.layout is FLOAT8_ROWS and scale.dim() == 3 and scale.shape[1] == 1
        turns = by_column or self.layout in (FLOAT8, FLOAT8_BLOCK_2D)
        if transposed and not turns:
            return []

        def of(one: Tensor, i: int) -> Tensor:
            own = one[i] if one.dim() else one
            return own.t().contiguous() if transposed and own.dim() == 2 else own

        return [{suffix: of(one, i) for suffix, one in found.items()} for i in range(len(codes))]

    def join(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor] | None:
        """Return the tensors of a weight of which each part has some of the rows.

        None if parts have scales of their own that the whole would share.
        """
        rows = self.layout.scale_group[0]
        by_rows = (self.codes, self.scales[0]) if rows else (self.codes,)
        if len(parts) == 1:
            return parts[0]
        if rows and any(len(part[self.codes]) % rows for part in parts[:-1]):
            return None
        first, whole = parts[0], {}
        for suffix in first:
            own = [part[suffix] for part in parts]
            if suffix not in by_rows and not all(torch.equal(one, own[0]) for one in own):
                return None
            whole[suffix] = torch.cat(own) if suffix in by_rows else own[0]
        return whole

    def assemble(
        self,
        key: str,
        found: dict[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        recipe: Recipe,
        module_type: str = "linear",
    ) -> Any:
        """Return the quantized weight (N, K), with memory of its own; ``found``: as :meth:`take` returns it.

        Raises:
            ValueError: another shape, another format than the recipe's, or scales that are no positive numbers.
        """
        quantizer = stored_quantizer(recipe, key.removesuffix(".weight"), self.weights, module_type)
        if quantizer._format_layout() is not self.layout:
            wanted = {FLOAT8_BLOCK_2D: "Float8BlockScaling", FLOAT8: "Float8CurrentScaling or DelayedScaling"}
            raise ValueError(
                f"recipe is {recipe_name(recipe)}, and the checkpoint's weights are those of {wanted[self.layout]}"
            )
        buffers = self.buffers(self, key, self._with_zeros(found), shape)
        return TensorProto(shape, dtype, quantizer).assemble(buffers)


_FLOAT8 = (FLOAT8, FLOAT8_ROWS, FLOAT8_BLOCK_2D)
_CHANGES = ("pre_quant_scale", "svdquant_lora_a", "weight_zero_point")
"""Tensors beside a weight without which it is another one."""


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
    """Return codes, and scales in fp32, as one, or per row, or per tile of 128 x 128."""
    scale = found[fmt.scales[0]]
    tiles, expected = fmt.layout is FLOAT8_BLOCK_2D, fmt.scale_shape(shape)
    if tiles and scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if not scale.is_floating_point():
        raise ValueError(f"the scales of {shown(key)} are {scale.dtype}; floating point is read")
    if scale.numel() != math.prod(expected) or (tiles and _sizes(scale.shape) != _sizes(expected)):
        each = "one scale per tensor is read"
        if fmt.layout is FLOAT8_ROWS:
            each = f"one scale for each of {shape[0]} rows is read"
        if tiles:
            each = (
                f"a weight of {shape} has {list(expected)} tiles of 128 x 128, which are read; the file is damaged or "
                "has other tiles"
            )
        raise ValueError(f"the scales of {shown(key)} are {tuple(scale.shape)}, and {each}")
    scale = scale.to(torch.float32, copy=True)
    _check_numbers(key, scale, ~(scale.isfinite() & (scale > 0)))
    if tiles:
        scale = scale.reshape(expected)
        padding = round_up(scale.shape[1], FLOAT8_BLOCK_SCALE_ALIGNMENT) - scale.shape[1]
        scale = torch.nn.functional.pad(scale, (0, padding))
    else:
        scale = scale.reshape(-1)
    return [found[fmt.codes].view(torch.uint8).clone(), scale]


def _sizes(shape: Iterable[int]) -> list[int]:
    """Return the sizes that are not 1: ModelOpt writes (4, 1, 2, 1) for 4 x 2 tiles."""
    return [size for size in shape if size != 1]


def _blocks(fmt: ReadFormat, key: str, found: dict[str, Tensor], shape: tuple[int, int]) -> list[Tensor]:
    """Return codes as they are on disk, and the scales of blocks padded as tensor cores read them."""
    block, nvfp4 = fmt.layout.scale_group[1], fmt.layout is NVFP4
    if shape[1] % block:
        raise ValueError(f"{shown(key)} is {shape}, and {fmt.name} is read in multiples of {block} columns")
    codes, scale = found[fmt.codes], found[fmt.scales[0]]
    _check_shape(f"the codes of {shown(key)}", codes, [shape[0], shape[1] * _BITS.get(fmt.layout, 8) // 8])
    longer = shape[1] // scale.shape[1] if scale.dim() == 2 and scale.shape[1] else 0
    if (
        nvfp4 and longer > block and not longer % block and not shape[1] % longer
    ):  # ModelOpt has blocks of 32, too
        scale = scale.view(torch.uint8).repeat_interleave(longer // block, 1).view(scale.dtype)
    _check_shape(f"the scales of {shown(key)}", scale, [shape[0], shape[1] // block])
    if scale.dtype not in ((torch.float8_e4m3fn,) if nvfp4 else (torch.uint8, torch.float8_e8m0fnu)):
        has = "float8_e4m3fn" if nvfp4 else "uint8, codes of E8M0"
        raise ValueError(f"the scales of {shown(key)} are {scale.dtype}; {fmt.name} has {has}")
    if nvfp4:
        wrong = scale.float()
        _check_numbers(key, wrong, ~(wrong >= 0))  # a block of zeros may have a scale of 0
    scale = scale.view(torch.uint8)
    if not nvfp4:
        _check_numbers(key, scale, scale == E8M0.nan_code)
    padding = (0, -scale.shape[1] % SCALE_TILE_COLUMNS, 0, -scale.shape[0] % SCALE_TILE_ROWS)
    buffers = [codes.view(torch.uint8).clone(), torch.nn.functional.pad(scale, padding).clone()]
    return [*buffers, _amax(fmt, key, found[fmt.scales[1]])] if nvfp4 else buffers


def _amax(fmt: ReadFormat, key: str, second: Tensor) -> Tensor:
    """Return the amax that a tensor's second scale stands for, fp32 (1,): within one unit of fp32.

    It has the reciprocal that an export writes.
    """
    if second.numel() != 1 or not second.is_floating_point():
        raise ValueError(
            f"{shown(key + fmt.scales[1])} is {second.dtype} of {tuple(second.shape)}; one floating-point scale is "
            "read"
        )
    second = second.to(torch.float32, copy=True).reshape(1)
    _check_numbers(key, second, ~(second.isfinite() & (second > 0)))
    # a number divided by a tensor is its reciprocal times the number in PyTorch
    is_reciprocal = fmt.scales[1] == "_global_scale"
    return torch.full_like(second, NVFP4_LARGEST) / second if is_reciprocal else second * NVFP4_LARGEST


_INPUTS = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale")
_TENSOR = ReadFormat(
    "stored", FLOAT8, torch.float8_e4m3fn, "", ("_scale",), _INPUTS, _eight_bits, Float8CurrentScaling
)
_CHANNEL = replace(_TENSOR, weights="fp8-channel", layout=FLOAT8_ROWS, recipe=Float8RowwiseScaling)
_TILES = replace(_TENSOR, layout=FLOAT8_BLOCK_2D, recipe=Float8BlockScaling)
_NVFP4 = ReadFormat(
    "nvfp4",
    NVFP4,
    torch.uint8,
    "_packed",
    ("_scale", "_global_scale"),
    _INPUTS,
    _blocks,
    Float8CurrentScaling,
)
# under Float8BlockScaling most of its values are exact
_MXFP4 = replace(_NVFP4, weights="mxfp4", layout=MXFP4, scales=("_scale",), recipe=Float8BlockScaling)
_MXFP6 = replace(_MXFP4, weights="mxfp6", layout=MXFP6)
_MXFP8 = replace(_MXFP4, weights="mxfp8", layout=MXFP8, dtype=torch.float8_e4m3fn, codes="")
_OF_TRANSFORMERS: dict[str, Any] = {"scales": ("_scale_inv",), "inputs": ("activation_scale",)}


@dataclass(frozen=True)
class PublicLayout:
    """A layout of quantized weights that a library writes.

    Args:
        package: of the library, or who publishes such files.
        config: what its ``quantization_config`` has: of compressed-tensors the format of a group and its weights.
        read: the tensors, and what they become.
        what: of the files, beyond what ``read`` says.
        compared: what tests compare the values with, beside the formula of the layout.
    """

    package: str
    config: dict[str, Any]
    read: ReadFormat
    what: str = ""
    compared: str = ""


def _fp8(
    read: ReadFormat, package: str = "transformers", what: str = "", compared: str = "", **config: Any
) -> PublicLayout:
    return PublicLayout(package, {"quant_method": "fp8", **config}, read, what, compared)


def _compressed(read: ReadFormat, format: str, **scheme: Any) -> PublicLayout:
    config = {"quant_method": "compressed-tensors", "format": format, **scheme}
    return PublicLayout("compressed-tensors", config, read, compared=_DECODER)


def _modelopt(read: ReadFormat, algorithm: str, what: str = "") -> PublicLayout:
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    return PublicLayout("nvidia-modelopt", config, read, what, f"{_DECODER}, its files")


_DECODER, _OF_HF = "its decoder", "the decoder of transformers"
_TILE = [FLOAT8_BLOCK, FLOAT8_BLOCK]
_E8M0 = "scales in fp32, bf16 or E8M0"
_M_NVFP4 = replace(_NVFP4, codes="", scales=("_scale", "_scale_2"))
_M_MXFP4 = replace(_MXFP4, codes="")

LAYOUTS = (
    _fp8(replace(_TILES, **_OF_TRANSFORMERS), what=_E8M0, compared=_DECODER, weight_block_size=_TILE),
    _fp8(replace(_TILES, scales=(".scale",)), "DeepSeek", _E8M0, _OF_HF, weight_block_size=_TILE),
    _fp8(
        replace(_TILES, scales=(".qscale_weight",), inputs=("qscale_act",)),
        "Mistral",
        _E8M0,
        _OF_HF,
        weight_block_size=_TILE,
    ),
    _fp8(
        replace(_MXFP4, dtype=torch.int8, codes="", scales=(".scale",)),
        "DeepSeek",
        "codes in int8",
        _OF_HF,
        expert_dtype="fp4",
    ),
    _fp8(replace(_MXFP8, **_OF_TRANSFORMERS), compared=_DECODER, weight_block_size=[1, MX_BLOCK]),
    _fp8(replace(_TENSOR, **_OF_TRANSFORMERS), compared=_DECODER, weight_block_size=None),
    _fp8(_TENSOR, "vllm", weight_block_size=None),
    PublicLayout("fbgemm-gpu", {"quant_method": "fbgemm_fp8"}, replace(_CHANNEL, inputs=("input_scale_ub",))),
    PublicLayout(
        "transformers",
        {"quant_method": "mxfp4"},
        replace(_MXFP4, codes="_blocks", scales=("_scales",), inputs=(), stacked=True),
        "all experts of a layer, decoded",
        _DECODER,
    ),
    _compressed(_TENSOR, "float-quantized", num_bits=8, strategy="tensor"),
    _compressed(_CHANNEL, "float-quantized", num_bits=8, strategy="channel"),
    _compressed(_TILES, "float-quantized", num_bits=8, strategy="block", block_structure=_TILE),
    _compressed(_MXFP8, "mxfp8-quantized", num_bits=8, group_size=MX_BLOCK),
    _compressed(_MXFP6, "mxfp6-pack-quantized", num_bits=6, group_size=MX_BLOCK),
    _compressed(_MXFP4, "mxfp4-pack-quantized", num_bits=4, group_size=MX_BLOCK),
    _compressed(_NVFP4, "nvfp4-pack-quantized", num_bits=4, group_size=NVFP4_BLOCK),
    _modelopt(_TENSOR, "FP8"),
    _modelopt(_CHANNEL, "FP8_PER_CHANNEL_PER_TOKEN"),
    _modelopt(_TILES, "FP8_PB_WO"),
    _modelopt(_MXFP8, "MXFP8"),
    _modelopt(_M_NVFP4, "NVFP4"),
    _modelopt(_M_NVFP4, "W4A16_NVFP4"),
    _modelopt(_M_NVFP4, "W4A8_NVFP4_FP8", "blocks of 32"),
    _modelopt(_M_MXFP4, "MXFP4"),
    _modelopt(_M_MXFP4, "W4A8_MXFP4_FP8"),
)
"""What is read; of two that fit a weight, the first."""

_SAME = {"naive-quantized": "float-quantized"}
"""Formats of compressed-tensors with the same files."""


def parts_of(config: Any) -> list[dict[str, Any]]:
    """Return what a ``quantization_config`` says of each kind of weights: that of a group, or of a layer."""
    found = config if isinstance(config, dict) else {}
    method = found.get("quant_method")
    if method == "modelopt":
        # ModelOpt writes "mxfp4" and "fp8_pb_wo", and its other names in capitals
        layers = found.get("quantized_layers")
        own = [found]
        if str(found.get("quant_algo")).upper() == "MIXED_PRECISION" and isinstance(layers, dict):
            own = [one for one in layers.values() if isinstance(one, dict)]
        return [{"quant_method": method, "quant_algo": str(one.get("quant_algo")).upper()} for one in own]
    if method != "compressed-tensors":
        return [found]
    groups = found.get("config_groups")
    parts = []
    for group in groups.values() if isinstance(groups, dict) else ():
        group = group if isinstance(group, dict) else {}
        scheme = group.get("weights")
        format = group.get("format") or found.get("format")
        format = _SAME.get(format, format) if isinstance(format, str) else format
        parts.append(
            {**(scheme if isinstance(scheme, dict) else {}), "quant_method": method, "format": format}
        )
    return parts


def layouts_of(part: dict[str, Any]) -> list[PublicLayout]:
    """Return the layouts that weights may have of which a configuration says this."""
    return [one for one in LAYOUTS if all(part.get(name) == value for name, value in one.config.items())]


def read_formats(config: Any) -> list[ReadFormat]:
    """Return how to read the weights of a checkpoint with this ``quantization_config``.

    Raises:
        ValueError: no recipe reads such weights, or it is none.
    """
    parts = parts_of(config)
    found = [layouts_of(part) for part in parts]
    if all(found) and found:
        return list(dict.fromkeys(one.read for layouts in found for one in layouts))
    wrong = next((part for part, layouts in zip(parts, found) if not layouts), None) or config
    named = (
        "quant_method",
        "quant_algo",
        "format",
        "weight_block_size",
        "num_bits",
        "strategy",
        "group_size",
    )
    told = {name: wrong[name] for name in named if name in wrong} if isinstance(wrong, dict) else wrong
    raise ValueError(
        f"the checkpoint's quantization_config is {shown(told or config)}; load_quantized reads FP8 (a scale per "
        "tensor, row or 128 x 128), MXFP8, MXFP6, MXFP4 and NVFP4, as the page Serve and export lists them; give one "
        "of these, or bf16 with weights="
    )


def format_of(key: str, tensors: dict[str, Tensor], formats: list[ReadFormat]) -> ReadFormat:
    """Return which of a checkpoint's formats a weight has, by its tensors."""
    return max(formats, key=lambda one: one.fits(key, tensors))  # the first of equals


def keys_of(tensors: dict[str, Tensor], formats: list[ReadFormat]) -> list[str]:
    """Return the names of all quantized weights."""
    return list(dict.fromkeys(key for one in formats for key in one.keys(tensors)))


def without_inputs(
    tensors: dict[str, Tensor], formats: list[ReadFormat], state: Container[str]
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors without the scales of inputs and KV caches, which the model does not have."""
    left_out = {name for one in formats for name in one.inputs}
    return {
        key: one for key, one in tensors.items() if key in state or key.rpartition(".")[2] not in left_out
    }
