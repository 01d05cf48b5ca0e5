"""``nn.Module``: its tables of parameters, buffers, children and hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .private import entry

entry(
    "frames of nn.Module.__call__",
    follows="torch/nn/modules/module.py, _wrapped_call_impl and _call_impl, whose frame calls hooks and forward",
    without="layers of a model that was given to narrowcast.set_recipe renew their own scales",
    falls_back=True,
)
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


def undo_casts(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Give buffers whose dtype a cast has changed the values from before it, on the device where they are now."""
    for name, exact in before.items():
        moved = module._buffers[name]
        if exact is None or moved is None or moved.dtype == exact.dtype:
            continue
        kept = torch.empty_like(moved, dtype=exact.dtype) if exact.is_meta else exact.to(moved.device)
        module._buffers[name] = kept


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's table of its children; writing to it changes the module."""
    return module._modules


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return what ``model.modules()`` yields, in another order; that one makes the names, too, which takes longer."""
    found: dict[nn.Module, None] = {model: None}
    left = [model]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return list(found)


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


def calling_frame(levels: int = 1) -> FrameType:
    """Return the frame that many calls above the caller's: of a hook, its module's call."""
    return sys._getframe(1 + levels)


def is_frame_of(address: int, code: CodeType, attribute: str, value: Any) -> bool:
    """Return whether a frame of this thread's stack has the address and the code, and its ``self`` the attribute.

    A later frame, of any function, may get the address of one that ended. One of this code without ``self`` passes.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame) != address:
        frame = frame.f_back
    if frame is None or frame.f_code is not code:
        return False
    own = frame.f_locals.get("self")
    return own is None or getattr(own, attribute, None) == value


def running_modules() -> list[nn.Module]:
    """Return the modules that are being called in this thread, innermost first."""
    modules, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module.__call__.__code__ and isinstance(frame.f_locals.get("self"), nn.Module):
            modules.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return modules
