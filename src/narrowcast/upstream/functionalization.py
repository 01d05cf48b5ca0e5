"""Functionalization, dispatch modes and proxies: how operators of the library meet the compiler's passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .private import entry, needed, private
from .tensors import storage_key

_INSTALL = "install a release that was tested"
_NOT_COMPILED = "run the model without torch.compile on this release"

FunctionalTensor: Any = needed(
    private("torch._subclasses.functional_tensor.FunctionalTensor", without=_INSTALL)
)
FunctionalMode: Any = needed(
    private("torch._subclasses.functional_tensor.FunctionalTensorMode", without=_INSTALL)
)
"""The mode in which a graph is functionalized; operators register rules for it."""


FakeTensor: Any = needed(private("torch._subclasses.fake_tensor.FakeTensor", without=_INSTALL))
FunctionalAPI: Any = private(
    "torch._subclasses.functional_tensor.PythonFunctionalizeAPI",
    follows="torch/_subclasses/functional_tensor.py; torch/_higher_order_ops/triton_kernel_wrap.py",
    without=_NOT_COMPILED,
)
"""What an operator's rule for functional tensors unwraps them with, and commits writes to them."""

OperatorMode: Any = needed(
    private(
        "torch.utils._python_dispatch.TorchDispatchMode",
        follows="torch/utils/_python_dispatch.py; documented in docs/source/notes/extending.rst",
        without=_INSTALL,
    )
)
"""A mode whose ``__torch_dispatch__`` sees every operator."""

current_mode: Callable[[], Any] = needed(
    private("torch.utils._python_dispatch._get_current_dispatch_mode", without=_INSTALL)
)
"""Return the innermost mode that sees operators, or None."""

without_modes: Callable[[], Any] = needed(
    private("torch.utils._python_dispatch._disable_current_modes", without=_INSTALL)
)
"""A context in which no mode sees operators."""

_detect_mode = private("torch.utils._python_dispatch._detect_infra_mode", without=_NOT_COMPILED)
_FUNCTIONAL = private(
    "torch._C._TorchDispatchModeKey.FUNCTIONAL", follows="torch/csrc/autograd/init.cpp", without=_NOT_COMPILED
)


def functional_mode() -> Any:
    """Return the mode that functionalizes the graph that is being traced, which lives as long as that takes."""
    return _detect_mode(_FUNCTIONAL)


_get_proxies = private("torch.fx.experimental.proxy_tensor._get_proxies", without=_NOT_COMPILED)
_mutation_count: Callable[[Tensor], int] = private(
    "torch._functionalize_mutation_counter",
    follows="aten/src/ATen/FunctionalTensorWrapper.cpp",
    without=_NOT_COMPILED,
)
_ELEM = entry(
    "FunctionalTensor.elem", follows="torch/_subclasses/functional_tensor.py", without=_NOT_COMPILED
)
_EXPORT = entry(
    "FunctionalTensorMode.export", follows="torch/_subclasses/functional_tensor.py", without=_NOT_COMPILED
)


def is_export(mode: Any) -> bool:
    """Return whether a functionalizing mode traces a graph to export."""
    if not hasattr(mode, "export"):
        raise _EXPORT.error()
    return bool(mode.export)


def state_key(tensor: Any) -> tuple[int, int]:
    """Return a key of a functional tensor's storage and of the writes to it so far."""
    if not hasattr(tensor, "elem"):
        raise _ELEM.error()
    return storage_key(tensor.elem), _mutation_count(tensor.elem)


end_library: Callable[[torch.library.Library], None] = private(
    "torch.library.Library._destroy",
    follows="torch/library.py",
    without="restart the process in place of importing narrowcast a second time",
)
"""End an operator library, so that its namespace can be defined again."""
