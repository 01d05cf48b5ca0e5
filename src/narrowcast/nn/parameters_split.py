"""``parameters_split``: weight and bias of a layer as several parameters, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._checks import shown, whole
from ..state import THREAD

ParametersSplit = Sequence[str] | Mapping[str, int]


def parts_of(
    parameters_split: ParametersSplit | None,
    out_features: int,
    place: torch.device,
    fuse_wgrad_accumulation: bool,
) -> tuple[list[int], dict[str, list[str]]]:
    """Return rows of each part, and names of the parts of "weight" and "bias"; without a split one part, and no names.

    Raises:
        TypeError: neither names nor a dict from names to rows.
        ValueError: no names, the same name twice, rows that do not sum to ``out_features``, or
            ``fuse_wgrad_accumulation``.
        RuntimeError: parameters on the meta device, or inside ``quantized_model_init``.
    """
    if parameters_split is None:
        return [out_features], {}
    sizes = _sizes(parameters_split, out_features)
    if fuse_wgrad_accumulation:
        raise ValueError(
            "fuse_wgrad_accumulation=True with parameters_split: no parameter has the main_grad of the whole weight; "
            "use one of them"
        )
    if place.type == "meta":
        raise RuntimeError("parameters_split with device='meta'; make the parameters on a real device")
    if THREAD.state.init_recipe is not None:
        raise RuntimeError(
            "parameters_split inside quantized_model_init; make the layer outside it, or without parameters_split"
        )
    names = [name.rstrip("_") for name, _ in sizes]
    if len(set(names)) < len(names):
        raise ValueError(f"parameters_split has names {shown(names)}; use every name once")
    parts = {kind: [f"{name}_{kind}" for name in names] for kind in ("weight", "bias")}
    return [rows for _, rows in sizes], parts


def _sizes(parameters_split: ParametersSplit, out_features: int) -> list[tuple[str, int]]:
    if isinstance(parameters_split, Mapping):
        sizes = list(parameters_split.items())
    elif isinstance(parameters_split, (list, tuple)) and all(isinstance(x, str) for x in parameters_split):
        count = max(len(parameters_split), 1)
        if out_features % count:
            raise ValueError(
                f"parameters_split has {count} names, which do not divide out_features={out_features} evenly; give a "
                "dict from names to rows"
            )
        sizes = [(name, out_features // count) for name in parameters_split]
    else:
        raise TypeError(
            f"parameters_split is {shown(parameters_split)}; give a sequence of names or a dict from names to rows"
        )
    if not sizes:
        raise ValueError("parameters_split is empty; give at least one name, or None")
    whole(**{f"parameters_split[{shown(name)}]": rows for name, rows in sizes})
    if any(rows < 1 for _, rows in sizes) or sum(rows for _, rows in sizes) != out_features:
        raise ValueError(
            f"parameters_split has rows {shown([rows for _, rows in sizes])}; use positive numbers that sum to "
            f"out_features={out_features}"
        )
    return sizes
