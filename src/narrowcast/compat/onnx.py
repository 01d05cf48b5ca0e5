"""Export to ONNX, which this library leaves to exported programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Refuse Transformer Engine's context around an ONNX export if it is enabled.

    Raises:
        NotImplementedError: ``enabled``.
    """
    if enabled:
        raise NotImplementedError(
            "onnx_export(enabled=True): quantized layers have no ONNX form here; export the model in high precision "
            "(narrowcast.set_recipe(model, None), then torch.export), or write a quantized checkpoint for a server "
            "with narrowcast.export"
        )
    yield
