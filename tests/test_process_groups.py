"""What tests with process groups share."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import process_group_removed


def begin(fails: bool = False) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if fails:
        raise ZeroDivisionError


def test_a_process_group_that_a_failure_leaves_is_removed() -> None:
    with pytest.raises(ZeroDivisionError), process_group_removed():
        begin(fails=True)
    assert not dist.is_initialized()


def test_a_process_group_from_before_stays() -> None:
    begin()
    with process_group_removed():
        pass
    assert dist.is_initialized()
    dist.destroy_process_group()
