"""Functionalization, dispatch modes and proxies: how operators of the library meet the compiler's passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy

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

CheckpointMode: Any = needed(
    private(
        "torch.utils.checkpoint._CachingTorchDispatchMode",
        follows="torch/utils/checkpoint.py; 2.13 tags the nodes of every checkpoint in it, 2.11 of selective ones",
        without=_INSTALL,
    )
)
"""The mode in which a compiled checkpoint tags its nodes."""

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
_UNCHECKED = entry(
    "node.meta['saved_tensor_with_no_vc_check']",
    follows="torch/_functorch/autograd_function.py, torch/_functorch/_aot_autograd/graph_compile.py",
    without="PyTorch's check of saved tensors raises in the backward of a compiled layer with delayed scaling",
)
_RECOMPUTE = entry(
    "node.meta['recompute']",
    follows="torch/_functorch/partitioners.py",
    without="compile without a checkpoint around delayed scaling, or run it without torch.compile",
)
_must_recompute = entry(
    "torch._functorch.partitioners.must_recompute",
    follows="torch/_functorch/partitioners.py",
    without="compile without a checkpoint around delayed scaling, or run it without torch.compile",
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


def allow_writes_after_saving(tensor: Tensor) -> None:
    """Tell the traced graph that a backward may find this tensor changed."""
    for proxy in _get_proxies(tensor):
        proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def _check_tags() -> None:
    """Check that the partitioner reads the tag that is written below: a renamed one would be lost in silence."""
    node = torch.fx.Graph().placeholder("x")
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    if not _must_recompute.take()(node):
        raise _RECOMPUTE.error("a partitioner that does not read it")


def is_in_checkpoint() -> bool:
    """Return whether the graph that is being traced is inside a checkpoint, whose operators its backward repeats."""
    return "recompute" in get_current_meta()


def node_of(tensor: Tensor) -> Any:
    """Return the node of the graph that is being traced whose value a tensor is; None if it has none."""
    proxies = _get_proxies(tensor)
    return proxies[0].node if proxies else None


def save_in_checkpoint(nodes: Iterable[Any]) -> None:
    """Make a checkpoint save the results of these nodes, whatever its policy."""
    _check_tags()
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


end_library: Callable[[torch.library.Library], None] = private(
    "torch.library.Library._destroy",
    follows="torch/library.py",
    without="restart the process in place of importing narrowcast a second time",
)
"""End an operator library, so that its namespace can be defined again."""
