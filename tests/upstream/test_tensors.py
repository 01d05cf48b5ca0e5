"""Storages, versions, schemas and hooks of tensors; fallbacks of what eager code asks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from narrowcast.upstream import tensors

SOURCE = Path(tensors.__file__).parents[2]


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


@pytest.mark.parametrize("taken", ["torch.UntypedStorage._cdata"])
def test_the_import_says_what_is_missing(taken: str) -> None:
    holder, name = taken.rsplit(".", 1)
    program = f"""
import builtins, torch
real = builtins.hasattr
builtins.hasattr = lambda of, name: False if name == {name!r} and of is {holder} else real(of, name)
try:
    import narrowcast
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
    )
    assert done.stdout.startswith("UpstreamError") and taken.split(".", 1)[1] in done.stdout, done.stderr[
        -500:
    ]


def test_autocast_is_off_by_the_public_way_as_by_the_short_one() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tensors.is_autocast() and tensors._is_autocast()
        for off in (tensors.autocast_off, tensors._AutocastOff):
            with off():
                assert not tensors.is_autocast() and not tensors._is_autocast()
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert tensors.is_autocast()


def test_where_tensors_are_made() -> None:
    assert not tensors.is_default_device_set()
    with torch.device("meta"):
        assert tensors.is_default_device_set()
