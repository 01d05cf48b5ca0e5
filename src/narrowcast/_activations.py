"""Activations as data: their names, which of them are gated, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ._checks import not_among, shown


@dataclass(frozen=True, slots=True)
class Activation:
    """A named activation.

    ``gated``: it applies to the first half of the last dim and multiplies the second.
    ``params``: numbers that are given by name, with their defaults.
    """

    gated: bool
    params: Mapping[str, float] = field(default_factory=dict)


ACTIVATIONS: dict[str, Activation] = {
    **{name: Activation(False) for name in ("gelu", "qgelu", "relu", "srelu", "silu")},
    **{name: Activation(True) for name in ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu")},
    "clamped_swiglu": Activation(True, {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}),
    "situ_glu": Activation(True, {"beta1": 4.0, "beta2": 25.0}),
}


def checked(activation: str, shape: Sequence[int], params: Mapping[str, float] | None = None) -> Activation:
    """Return the activation of a name, for an input of a shape.

    Args:
        activation: a name in ``ACTIVATIONS``.
        shape: of the input.
        params: parameters given by name.

    Raises:
        ValueError: an unknown name or parameter, rank 0, or an odd last dim of a gated activation.
    """
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation is {not_among(activation, ACTIVATIONS)}")
    found = ACTIVATIONS[activation]
    if params is not None and not isinstance(params, dict):
        raise ValueError(f"activation_params is {shown(params)}; use a dict from names to numbers")
    for name in params or ():
        if name not in found.params:
            takes = ", ".join(found.params) or "none"
            raise ValueError(f"{activation} has no parameter {shown(name)}; it takes {takes}")
    if len(shape) == 0 or (found.gated and shape[-1] % 2):
        needs = "an even last dim" if found.gated else "a last dim"
        raise ValueError(f"{activation} needs {needs}, got shape {tuple(shape)}")
    return found
