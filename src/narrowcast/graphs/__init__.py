"""Forward and backward of modules as CUDA graphs."""

from .make_graphed_callables import make_graphed_callables

__all__ = ["make_graphed_callables"]
