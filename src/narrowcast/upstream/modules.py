"""``nn.Module``: its tables of parameters, buffers, children and hooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .private import entry

_INSTALL = "install a release that was tested"
_TABLES = [
    entry(f"nn.Module.{name}", follows="torch/nn/modules/module.py", without=_INSTALL)
    for name in (
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
]
_probe = vars(nn.Module())
for _table in _TABLES:
    if _table.name.removeprefix("nn.Module.") not in _probe:
        raise _table.error()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's table of its own parameters, None among them; writing to it changes the module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's table of its own buffers, None among them; writing to it changes the module."""
    return module._buffers


def is_saved(module: nn.Module, name: str) -> bool:
    """Return whether state dicts have the module's buffer of this name."""
    return name not in module._non_persistent_buffers_set


@torch.no_grad()
def keep_values(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Give buffers that a cast or a move has replaced their dtype and values from before it, on their new device."""
    for name, exact in before.items():
        moved = module._buffers[name]
        if exact is None or moved is None or moved is exact:
            continue
        if moved.dtype != exact.dtype or moved.is_inference():
            with torch.inference_mode(False):  # the module may be trained later
                moved = torch.empty(exact.shape, dtype=exact.dtype, device=moved.device)
            module._buffers[name] = moved
        if exact.is_meta:
            moved.zero_()  # what leaves the meta device is uninitialized memory
        else:
            moved.copy_(exact)


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's table of its children; writing to it changes the module."""
    return module._modules


def own_tables(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any], dict[int, Any]]]:
    """Return each module's tables of its own parameters, of its children, and of hooks before its forward."""
    tables = []
    for module in modules:
        tables.append((module._parameters, module._modules, module._forward_pre_hooks))
    return tables


def drop_buffer(module: nn.Module, name: str) -> None:
    """Take a buffer off a module, if it is there."""
    module._buffers.pop(name, None)
    module._non_persistent_buffers_set.discard(name)


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the module's table of hooks that run before its forward; deleting from it removes them."""
    return module._forward_pre_hooks


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the module's table of hooks that run after its forward; deleting from it removes them."""
    return module._forward_hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs in the module's backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def left_out_of_checkpoints(model: nn.Module) -> list[re.Pattern[str]]:
    """Return patterns of the tensors in a checkpoint that a model of Transformers leaves out."""
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    given = patterns if isinstance(patterns, (list, set, tuple)) else ()
    return [re.compile(one) for one in given if isinstance(one, str)]
