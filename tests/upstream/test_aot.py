"""AOTAutograd's wrappers around compiled code are seen, or an error says that they are not."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.upstream import aot
from narrowcast.upstream.private import UpstreamError


class Noted(TorchDispatchMode):
    """Notes whether compiled code runs when an operator is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found.append(aot.runs_compiled())
        return func(*args, **(kwargs or {}))


def test_compiled_code_is_seen_forward_and_backward() -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x).sum(), backend="aot_eager")
    x = torch.ones(2, 2, requires_grad=True)
    compiled(x).backward()
    with Noted() as mode:
        compiled(x).backward()
    assert sum(mode.found) >= 4
    with Noted() as mode:
        x.detach().sin()
    assert mode.found and not any(mode.found)


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "_FOLDERS", ())
    with pytest.raises(UpstreamError, match=r"frames of torch/_functorch.*without receipt.recording"):
        aot.runs_compiled()
