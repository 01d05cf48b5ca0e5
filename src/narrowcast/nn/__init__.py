"""Modules: parameters, resolution of the recipe, one call."""

from .linear import Linear
from .module import QuantizedModule

__all__ = ["Linear", "QuantizedModule"]
