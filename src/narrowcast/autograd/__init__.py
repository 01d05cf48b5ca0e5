"""Autograd functions: the boundaries between modules and operators."""

from .linear import (
    DelayedTensors,
    LinearBwdArgs,
    LinearCaching,
    LinearFwdArgs,
    LinearNeeds,
    LinearNumerics,
    linear,
)

__all__ = [
    "DelayedTensors",
    "LinearBwdArgs",
    "LinearCaching",
    "LinearFwdArgs",
    "LinearNeeds",
    "LinearNumerics",
    "linear",
]
