"""Tensors: wrapper subclasses, storages and versions, what an operator's schema says, trees of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from .private import entry, needed, private

_INSTALL = "install a release that was tested"

make_wrapper: Callable[..., Any] = private(
    "torch.Tensor._make_wrapper_subclass",
    follows="torch/csrc/autograd/python_variable.cpp",
    without="quantized tensors need a release that was tested",
)
"""``make_wrapper(cls, size, strides=, storage_offset=, dtype=, device=, ...)``: a tensor without memory of its own."""

no_torch_function: Any = needed(
    private(
        "torch._C._disabled_torch_function_impl",
        follows="torch/csrc/utils/disable_torch_function.cpp; documented in docs/source/notes/extending.rst",
        without=_INSTALL,
    )
)
"""``__torch_function__`` of a tensor class whose operators arrive at ``__torch_dispatch__``, whole and unwrapped."""

_SCHEMA = entry("OpOverload._schema", follows="torch/_ops.py", without=_INSTALL)
_VERSION = entry("Tensor._version", follows="torch/csrc/autograd/python_variable.cpp", without=_INSTALL)
_BASE = entry("Tensor._base", follows="torch/csrc/autograd/python_variable.cpp", without=_INSTALL)
_CDATA = entry("UntypedStorage._cdata", follows="torch/csrc/Storage.cpp", without=_INSTALL)

for _of, _name, _entry in (
    (torch.ops.aten.add.Tensor, "_schema", _SCHEMA),
    (Tensor, "_version", _VERSION),
    (Tensor, "_base", _BASE),
    (torch.UntypedStorage, "_cdata", _CDATA),
):
    if not hasattr(_of, _name):
        raise _entry.error()


def schema_of(overload: Any) -> Any:
    """Return the schema of an overload: its name, and its arguments with types and what they alias."""
    return overload._schema


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Return how often a tensor was written to in place."""


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view was made of by autograd; None for others."""
    return tensor._base


def is_view_of(x: Tensor, tensors: tuple[Tensor, ...]) -> bool:
    """Return whether autograd knows ``x`` as one of these tensors, or as a view of their memory."""
    base = x._base
    for given in tensors:  # noqa: SIM110  # a generator is two more calls in each step
        if x is given or (base is not None and (base is given or base is given._base)):
            return True
    return False


def storage_key(tensor: Tensor) -> int:
    """Return a number that tells the tensor's storage from all others that live."""
    return tensor.untyped_storage()._cdata


has_inner_tensors: Callable[[Any], bool] = private(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", without=_INSTALL
)
"""Return whether a tensor wraps others and tells them by ``__tensor_flatten__``."""

rebuild_tensor: Callable[..., Tensor] = private(
    "torch._utils._rebuild_tensor_v2",
    without="extra state of Transformer Engine's layers is not read; save it with get_extra_state of this release",
)
"""What a pickle of a tensor calls."""
REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
"""Its name in a pickle."""

_HOOKS = entry("Tensor._post_accumulate_grad_hooks", follows="torch/_tensor.py", without=_INSTALL)
if not hasattr(Tensor, "_post_accumulate_grad_hooks"):
    raise _HOOKS.error()


def accumulation_hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks that run after a parameter's gradient was accumulated."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


_PYTREE = "torch/utils/_pytree.py; there is no public one"
tree_map_only: Callable[..., Any] = private(
    "torch.utils._pytree.tree_map_only", follows=_PYTREE, without=_INSTALL
)
tree_leaves: Callable[..., list[Any]] = private(
    "torch.utils._pytree.tree_leaves", follows=_PYTREE, without=_INSTALL
)
tree_flatten: Callable[..., Any] = private(
    "torch.utils._pytree.tree_flatten", follows=_PYTREE, without=_INSTALL
)
tree_unflatten: Callable[..., Any] = private(
    "torch.utils._pytree.tree_unflatten", follows=_PYTREE, without=_INSTALL
)


def _many(*_: Any) -> int:
    return 1


def _always() -> bool:
    return True


_THROUGH_DISPATCHER = "every operator goes through PyTorch's dispatcher, which takes the host longer"
count_modes: Callable[[], int] = private(
    "torch._C._len_torch_dispatch_stack",
    follows="torch/csrc/autograd/init.cpp",
    without=_THROUGH_DISPATCHER,
    fallback=_many,
)
"""Return how many dispatch modes are on; not for traced code."""

is_profiled: Callable[[], bool] = private(
    "torch.autograd._profiler_enabled",
    follows="torch/autograd/__init__.py",
    without=_THROUGH_DISPATCHER,
    fallback=_always,
)
"""Return whether a profiler records operators; not for traced code."""


def _is_autocast() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu"))


is_autocast: Callable[[], bool] = private(
    "torch._C._is_any_autocast_enabled",
    follows="torch/csrc/autograd/init.cpp",
    without="torch.is_autocast_enabled is asked for each kind of device",
    fallback=_is_autocast,
)
"""Return whether a ``torch.autocast`` is on for any device; not for traced code."""

in_transform: Callable[[], bool] = private(
    "torch._C._are_functorch_transforms_active",
    follows="torch/csrc/functorch/init.cpp",
    without=_INSTALL,
)
"""Return whether a transform of torch.func is active; in traced code a constant."""


class _AutocastOff:
    def __enter__(self) -> None:
        self._off = [torch.autocast(kind, enabled=False) for kind in ("cuda", "cpu")]
        for context in self._off:
            context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for context in reversed(self._off):
            context.__exit__(*exception)


autocast_off: Callable[[], Any] = private(
    "torch._C._DisableAutocast",
    follows="torch/csrc/autograd/init.cpp",
    without="torch.autocast(..., enabled=False) is entered for each kind of device, which takes the host longer",
    fallback=_AutocastOff,
)
"""Return a context in which no ``torch.autocast`` is on."""

_function_modes = private("torch.overrides._get_current_function_mode_stack", without=_INSTALL)
_DeviceContext = private("torch.utils._device.DeviceContext", without=_INSTALL)


def is_default_device_set() -> bool:
    """Return whether ``with torch.device(...)`` or ``torch.set_default_device`` say where tensors are made."""
    return any(isinstance(mode, needed(_DeviceContext)) for mode in _function_modes())


_flag = private(
    "torch.compiler._is_exporting_flag",
    follows="torch/compiler/__init__.py",
    without="torch.compiler.is_exporting() is called, which later releases answer right",
    fallback=None,
)
if _flag is not None and TorchVersion(torch.__version__) < "2.15":

    def is_exporting() -> bool:
        # Dynamo of PyTorch 2.11 answers torch.compiler.is_exporting() with True in whatever it traces
        return torch.compiler._is_exporting_flag
else:
    is_exporting = torch.compiler.is_exporting
"""Return whether a graph is traced for ``torch.export``; for traced code, where later releases have a constant."""


unsafe_view: Any = private(
    "torch.ops.aten._unsafe_view.default",
    follows="aten/src/ATen/native/native_functions.yaml",
    without="matrix products of batches give plain views",
    fallback=torch.ops.aten.view.default,
)
"""The operator by which autograd's decompositions shape the result of a product."""
