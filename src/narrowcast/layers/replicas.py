"""``DistributedDataParallel`` leaves the state of delayed scaling to each rank.

By default it broadcasts the buffers of rank 0 before each forward. That would replace what the other ranks have
collected, before their scales are renewed from it. Its constructor does broadcast the state, with the weights.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

PENDING: list[weakref.ref[DistributedDataParallel]] = []
"""Replicas made since a layer last ran."""


def _note_replica(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        PENDING.append(weakref.ref(parent))


register_module_module_registration_hook(_note_replica)


def leave_state_to_ranks() -> None:
    """Take the state of delayed layers out of what replicas broadcast from their next forward on."""
    while PENDING:
        replica = PENDING.pop()()
        if replica is not None:
            names = {
                f"{path}.{name}" if path else name
                for path, module in replica.module.named_modules()
                if hasattr(module, "_state_names")
                for name in module._state_names()
            }
            replica.parameters_to_ignore = names.union(replica.parameters_to_ignore)
            kept = {
                name: buffer for name, buffer in replica.named_module_buffers.items() if name not in names
            }
            replica.named_module_buffers, replica.modules_buffers = kept, list(kept.values())
