"""``CheckpointNames``: the names that a model's tensors have in checkpoints, which servers load by.

Transformers renames parameters when it loads a checkpoint, and stacks the experts of a mixture into 3-D parameters. Its
``revert_weight_conversion`` turns names and tensors back, for every architecture that it knows. Other models keep the
names of their state dict; experts are then named as those of Qwen and DeepSeek.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..upstream.modules import left_out_of_checkpoints

_LOADING = "transformers.core_model_loading"
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_ROOM = 2**20
"""Values of each tensor's sketch: more than twice its experts."""


class CheckpointNames:
    """The checkpoint's names of one model's tensors.

    Args:
        model: of Transformers, or any other.
        state: the state dict; only its keys and shapes are read.
    """

    def __init__(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        self._model = model
        # a model of Transformers has imported it
        loading: Any = sys.modules.get(_LOADING) if hasattr(model, "save_pretrained") else None
        self._revert: Any = getattr(loading, "revert_weight_conversion", None)
        # the tensors of the checkpoint that hold one of the state dict: by name, which of its values
        self._holders: dict[str, dict[str, list[float]]] = {}
        if self._revert is not None:
            sketch = {key: _sketch(i, value) for i, (key, value) in enumerate(state.items())}
            self._find_holders(sketch, list(sketch))

    def _find_holders(self, sketch: dict[str, Tensor], keys: list[str]) -> None:
        """Convert small tensors, whose values say which tensor and which rows of it they are."""
        try:
            converted = self._revert(self._model, {key: sketch[key] for key in keys})
        except Exception:  # a conversion of some tensor needs its sizes
            for key in keys if len(keys) > 1 else ():
                self._find_holders(sketch, [key])
            return
        order = list(sketch)
        for name, held in converted.items():
            key = order[int(held.flatten()[0].item() // _ROOM)]
            if held.shape == sketch[key].shape or sketch[key].dim() == 3:
                own = self._holders.setdefault(key, {})
                own[name] = held.remainder(_ROOM).flatten().tolist()

    def converted(self, key: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of the checkpoint that hold one of the state dict."""
        name = self.of(key)
        if name is not None or self._revert is None:
            return [(name or key, tensor)]
        return self._revert(self._model, {key: tensor}).items()

    def all_of(self, key: str) -> list[str]:
        """Return the names of the checkpoint's tensors that hold one of the state dict; its own if it is not known."""
        return list(self._holders.get(key, {key: []}))

    def of(self, key: str) -> str | None:
        """Return the name of the checkpoint's tensor that is this one; None if it is arranged otherwise there."""
        if self._revert is None:
            return key
        names = list(self._holders.get(key, ()))
        return names[0] if len(names) == 1 else None

    def in_model(self, tensors: dict[str, Tensor], state: Collection[str]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors under the model's names; those beside a weight follow it.

        Those that the model of Transformers says that it leaves out, such as layers that predict further tokens, do not
        come.
        """
        known = {name: key for key in state if (name := self.of(key)) is not None}
        owners = {
            name.rpartition(".")[0]: key.rpartition(".")[0]
            for name, key in known.items()
            if name.rpartition(".")[2] == key.rpartition(".")[2]
        }

        def renamed(name: str) -> str:
            owner, dot, last = name.rpartition(".")
            weight = f"{owner}{dot}weight"
            if name in state or name in known:
                return name if name in state else known[name]
            if weight in known and last.startswith("weight"):
                return known[weight] + last.removeprefix("weight")
            return owners.get(owner, owner) + dot + last

        left_out, modules = left_out_of_checkpoints(self._model), {key.rpartition(".")[0] for key in state}
        found = {renamed(name): tensor for name, tensor in tensors.items()}
        return {
            name: tensor
            for name, tensor in found.items()
            if name.rpartition(".")[0] in modules or not any(one.search(name) for one in left_out)
        }

    def of_experts(self, key: str, experts: int, one_by_one: bool = False) -> list[list[str]] | None:
        """Return the names of stacked experts (E, N, K), for each expert those of its equal parts by rows.

        None if the checkpoint stacks them, too, or otherwise arranges them. ``one_by_one``: servers also take them so,
        though the checkpoint stacks them.
        """
        if self._revert is None or one_by_one:
            owner, _, last = (self.of(key) or key).rpartition(".")
            names = [
                [f"{owner}.{i}.{part}.weight".lstrip(".") for part in _PARTS.get(last, ())]
                for i in range(experts)
            ]
            return names if last in _PARTS else None
        holders = self._holders.get(key, {}).items()
        found: list[list[str]] = []
        for first in range(0, 2 * experts, 2):
            whole = [name for name, rows in holders if rows == [first, first + 1]]
            halves = [name for half in (first, first + 1) for name, rows in holders if rows == [half]]
            found.append(whole or halves)
        return found if {len(names) for names in found} in ({1}, {2}) else None


def _sketch(index: int, value: Tensor) -> Tensor:
    """Return a small tensor that stands for one of the state dict: experts with two rows each, a matrix with two."""
    if value.dim() == 3:
        rows = torch.arange(2.0 * len(value), dtype=torch.float64).view(-1, 2, 1)
    else:
        rows = torch.zeros((2, 1) if value.dim() == 2 else (1,) * value.dim(), dtype=torch.float64)
    return rows + index * _ROOM
