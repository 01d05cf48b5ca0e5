"""``CheckpointNames``: the names that a model's tensors have in checkpoints, which servers load by.

Transformers renames parameters when it loads a checkpoint, and stacks the experts of a mixture into 3-D parameters. Its
``revert_weight_conversion`` turns names and tensors back, for every architecture that it knows. Other models keep the
names of their state dict; experts are then named as those of Qwen and DeepSeek.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_LOADING = "transformers.core_model_loading"
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


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
        self._keeps_names = self._revert is None or self._is_unchanged(state)

    def _is_unchanged(self, state: dict[str, Tensor]) -> bool:
        sketch = {key: torch.empty(value.shape, device="meta") for key, value in state.items()}
        return set(self._revert(self._model, sketch)) == set(state)

    def converted(self, key: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of the checkpoint that hold one of the state dict."""
        return [(key, tensor)] if self._keeps_names else self._revert(self._model, {key: tensor}).items()

    def of(self, key: str) -> str | None:
        """Return the name of a matrix; None if the checkpoint holds it in several tensors."""
        names = [name for name, _ in self.converted(key, torch.empty(2, 1))]
        return names[0] if len(names) == 1 else None

    def of_experts(self, key: str, experts: int) -> list[list[str]] | None:
        """Return the names of stacked experts (E, N, K), for each expert those of its equal parts by rows.

        None if the checkpoint stacks them, too, or otherwise arranges them.
        """
        if self._revert is None:
            owner, _, last = key.rpartition(".")
            parts = _STACKED.get(last, ())
            return (
                [[f"{owner}.{i}.{part}.weight".lstrip(".") for part in parts] for i in range(experts)]
                if parts
                else None
            )
        if self._keeps_names:
            return None
        # the values say which rows of which expert a tensor of the checkpoint holds
        rows = torch.arange(2.0 * experts).view(experts, 2, 1)
        found = {name: rows.flatten().tolist() for name, rows in self.converted(key, rows)}
        names: list[list[str]] = []
        for expert in range(experts):
            halves, whole = [2.0 * expert, 2.0 * expert + 1], [[2.0 * expert, 2.0 * expert + 1]]
            for parts in ([[half] for half in halves], whole):
                named = [[name for name, held in found.items() if held == part] for part in parts]
                if all(len(one) == 1 for one in named):
                    names.append([one[0] for one in named])
        return names if len(names) == experts else None
