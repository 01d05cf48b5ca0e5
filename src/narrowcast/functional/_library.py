"""The operator library ``narrowcast::*`` and the one way to define an operator in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _opaque
from .quantizer_value import QuantizerValue

_LIBRARY = torch.library.Library("narrowcast", "DEF")

QUANTIZER = _opaque.schema_type(QuantizerValue) if _opaque.AVAILABLE else "Any"


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
) -> Callable[..., Any]:
    """Define ``narrowcast::<schema>`` and return its default overload.

    One implementation serves CPU and CUDA tensors: it picks reference or kernels from the device. Outputs must alias
    neither an input nor each other, and the fake's strides must be the real ones; the compiler relies on both.
    Without the opaque-object API an operator that takes a quantizer is its plain Python implementation, eager only.
    """
    if not _opaque.AVAILABLE and QUANTIZER in schema:
        return implementation
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, _without_autocast(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowcast::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.narrowcast, name).default


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An ambient torch.autocast must not reach into the numerics: their matrix products are fp32 on purpose."""

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return implementation(*args, **kwargs)

    return run
