"""``DistributedDataParallel``: how it makes parameters and buffers of ranks equal."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container
from typing import Any

from torch import nn
from torch.nn.parallel import distributed

from .private import entry, private

_WITHOUT = "build the model without quantized_model_init and wrap that"
_FOLLOWS = "torch/nn/parallel/distributed.py, which imports it from torch/distributed/utils.py"
_SYNC = "torch.nn.parallel.distributed._sync_module_states"
_sync_module_states: Any = private(_SYNC, follows=_FOLLOWS, without=_WITHOUT)
_ARGUMENTS = entry("arguments of _sync_module_states", follows=_FOLLOWS, without=_WITHOUT)


def synchronize_first(
    concerns: Callable[[Any], bool], synchronize: Callable[[nn.Module, Any, int, Container[str]], set[str]]
) -> None:
    """Make replicas call ``synchronize`` before they broadcast a module's parameters and buffers.

    Args:
        concerns: whether a module has anything for ``synchronize``; others are broadcast as ever.
        synchronize: takes the module, the process group, the rank of it that the others follow, and the names that are
            left to each rank. It returns the names of what it has made equal itself, which PyTorch then leaves out.
    """
    if not _sync_module_states:
        return  # :func:`check_synchronization` says so

    @functools.wraps(_sync_module_states)
    def synchronized(*args: Any, **options: Any) -> Any:
        if not any(isinstance(one, nn.Module) and concerns(one) for one in (*args, *options.values())):
            return _sync_module_states(*args, **options)
        bound = inspect.signature(_sync_module_states).bind(*args, **options).arguments
        try:
            given = [
                bound[name] for name in ("module", "process_group", "src", "params_and_buffers_to_ignore")
            ]
        except KeyError:
            raise _ARGUMENTS.error(", ".join(bound)) from None
        return _sync_module_states(
            **{**bound, "params_and_buffers_to_ignore": synchronize(*given).union(given[-1])}
        )

    distributed._sync_module_states = synchronized


def check_synchronization() -> None:
    """
    Raises:
        UpstreamError: this release makes ranks equal in another way.
    """
    if not _sync_module_states:
        _sync_module_states()
