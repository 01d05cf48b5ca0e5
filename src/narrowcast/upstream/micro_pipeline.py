"""PyTorch's micro-pipeline for tensor parallelism: symmetric memory, Inductor's option and pass, and graph nodes.

Importing this file loads Inductor, which takes seconds, so only users of the pipeline import it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .private import Absent, entry, private

_WITHOUT = "compile without narrowcast.distributed.async_tensor_parallel"
_PASS = "torch/_inductor/custom_graph_pass.py"

GraphPass: Any = private(
    "torch._inductor.custom_graph_pass.CustomGraphPass", without=_WITHOUT, fallback=object
)
"""The class of passes that Inductor runs over graphs; without it :func:`turn_on` raises."""

hash_of_files: Any = private("torch._inductor.custom_graph_pass.get_hash_for_files", without=_WITHOUT)
"""Return what caches of compiled graphs tell a pass by, from its files."""

_config: Any = private("torch._inductor.config", follows="torch/_inductor/config.py", without=_WITHOUT)
_enable: Any = private(
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
    follows="torch/distributed/_symmetric_memory/__init__.py",
    without=_WITHOUT,
)
_workspace: Any = private(
    "torch.distributed._symmetric_memory.get_symm_mem_workspace",
    follows="torch/distributed/_symmetric_memory/__init__.py",
    without=_WITHOUT,
)
_OPTIONS = {
    name: entry(f"torch._inductor.config.{name}", follows="torch/_inductor/config.py", without=_WITHOUT)
    for name in ("_micro_pipeline_tp", "post_grad_custom_pre_pass")
}
_VALUE = entry("node.meta['val']", follows="torch/_inductor/fx_passes/micro_pipeline_tp.py", without=_WITHOUT)
_unsafe_view = private("torch.ops.aten._unsafe_view.default", follows="ATen", without=_WITHOUT)
_scaled_product = private("torch.ops.aten._scaled_mm.default", follows="ATen", without=_WITHOUT)


def start_symmetric_memory(group_name: str) -> None:
    """Set symmetric memory up for a group.

    Raises:
        RuntimeError, ValueError: its GPUs have none.
    """
    _enable(group_name)
    _workspace(group_name, min_size=1)


def turn_on(graph_pass: Any, own: type) -> bool:
    """Turn the micro-pipeline on, with a pass before it; return whether another pass is in that place.

    Args:
        own: class of passes that may be replaced.
    Raises:
        UpstreamError: this release has no such option.
    """
    for name, found in _OPTIONS.items():
        if not hasattr(_config, name):
            raise found.error()
    if isinstance(hash_of_files, Absent):
        hash_of_files()
    if not isinstance(_config.post_grad_custom_pre_pass, (own, type(None))):
        return True
    _config.post_grad_custom_pre_pass, _config._micro_pipeline_tp = graph_pass, True
    return False


def value_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that a node stands for.

    Raises:
        UpstreamError: it holds none.
    """
    if "val" not in node.meta:
        raise _VALUE.error(", ".join(map(str, node.meta)))
    return node.meta["val"]


def set_value(node: fx.Node, value: torch.Tensor) -> None:
    """Set the fake tensor that a new node stands for."""
    node.meta["val"] = value


def is_view(target: Any) -> bool:
    """Return whether an operator gives the same elements another shape."""
    return target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default, _unsafe_view)


def is_scaled_product(target: Any) -> bool:
    """Return whether an operator multiplies FP8 matrices natively."""
    return target == _scaled_product
