"""Storages, versions, schemas and hooks of tensors; fallbacks of what eager code asks."""

from __future__ import annotations

import builtins
import runpy
from typing import Any

import pytest
import torch

from narrowcast.upstream import tensors
from narrowcast.upstream.private import UpstreamError


def test_schema() -> None:
    """``OpOverload._schema``."""
    schema = tensors.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable and [argument.name for argument in schema.arguments] == [
        "self",
        "other",
        "alpha",
    ]


def test_versions_count_writes() -> None:
    """``Tensor._version``."""
    x = torch.zeros(3)
    before = tensors.version_of(x)
    x.add_(1)
    assert tensors.version_of(x) == before + 1


def test_views_know_their_base() -> None:
    """``Tensor._base``."""
    x = torch.zeros(4)
    assert tensors.base_of(x[1:]) is x and tensors.base_of(x) is None
    assert (
        tensors.is_view_of(x, (x,))
        and tensors.is_view_of(x[1:], (x,))
        and tensors.is_view_of(x[1:], (x[:1],))
    )
    assert not tensors.is_view_of(x + 1, (x,)) and not tensors.is_view_of(x, (x + 1, x[1:]))


def test_storages_have_keys() -> None:
    """``UntypedStorage._cdata``."""
    x, y = torch.zeros(4), torch.zeros(4)
    assert tensors.storage_key(x) == tensors.storage_key(x[1:]) != tensors.storage_key(y)


def test_hooks_of_accumulation() -> None:
    """``Tensor._post_accumulate_grad_hooks``."""
    x = torch.zeros(2, requires_grad=True)
    assert tensors.accumulation_hooks(x) == []
    x.register_post_accumulate_grad_hook(print)
    assert tensors.accumulation_hooks(x) == [print]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # it runs a second time
@pytest.mark.parametrize(
    "holder, name",
    [
        (torch.ops.aten.add.Tensor, "_schema"),
        (torch.Tensor, "_version"),
        (torch.Tensor, "_base"),
        (torch.UntypedStorage, "_cdata"),
        (torch.Tensor, "_post_accumulate_grad_hooks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_import_says_what_is_missing(holder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hasattr
    with monkeypatch.context() as patched:
        patched.setattr(
            builtins, "hasattr", lambda of, what: (of is not holder or what != name) and real(of, what)
        )
        with pytest.raises(UpstreamError, match=rf"{name}.*install a release that was tested"):
            runpy.run_module("narrowcast.upstream.tensors")


def test_autocast_is_off_by_the_public_way_as_by_the_short_one() -> None:
    ones = torch.ones(2, 2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tensors.is_autocast() and tensors._is_autocast()
        for off in (tensors.autocast_off, tensors._AutocastOff):
            with off():
                assert not tensors.is_autocast() and not tensors._is_autocast()
                assert (ones @ ones).dtype is torch.float32
        assert tensors.is_autocast()


def test_where_tensors_are_made() -> None:
    assert not tensors.is_default_device_set()
    with torch.device("meta"):
        assert tensors.is_default_device_set()
