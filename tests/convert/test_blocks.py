"""Blocks that a recipe's authors keep in high precision stay so, by their place in the model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import narrowcast as nc

from .models import Block, Mixture

NVFP4 = nc.recipe.NVFP4BlockScaling(emulate=True)


def blocks(count: int, width: int = 64) -> list[nn.Module]:
    return [Block(width) for _ in range(count)]


def kept(model: nn.Module, recipe: Any = NVFP4, **options: Any) -> list[str]:
    gemms = nc.convert(model, recipe, dry_run=True, **options).gemms
    return [one.name for one in gemms if one.decision == "kept"]


def kept_blocks(model: nn.Module, depth: int = 0, **options: Any) -> set[int]:
    return {int(name.split(".")[depth]) for name in kept(model, **options)}


@pytest.mark.parametrize(
    ("count", "first", "last"), [(2, 0, 0), (4, 0, 1), (12, 0, 2), (16, 1, 2), (32, 1, 4), (62, 2, 8)]
)
def test_nvfp4_keeps_the_first_and_last_blocks(count: int, first: int, last: int) -> None:
    """2 of 62 and 8 of 62, as in the 12B model of arXiv:2509.25149, and the same shares of others."""
    stack = nn.ModuleList(blocks(count, 32))
    assert kept_blocks(stack) == {*range(first), *range(count - last, count)}
    assert kept(stack, blocks=True) == kept(stack, "mxfp8") == []


def test_the_receipt_gives_reason_and_option() -> None:
    model = nc.convert(nn.Sequential(*blocks(8)), NVFP4)
    found = {one.name: one for one in nc.receipt(model).gemms}
    assert found["7.down"].reason == (
        "among the first and last blocks, which the recipe's authors keep so (arXiv:2509.25149, section 4.1); "
        "blocks=True converts it"
    )
    assert found["6.down"].decision == "converted" and type(model[7].down) is nn.Linear
    nc.convert(model, NVFP4, blocks=True)
    assert all(one.decision == "converted" for one in nc.receipt(model).gemms)


def test_a_whole_name_converts_and_a_block_alone_is_told_so() -> None:
    stack = nn.ModuleList(blocks(8))
    assert "7.down" not in kept(stack, only=["7.down", "6"])
    with pytest.raises(ValueError, match=r"which the recipe's authors keep so .*; blocks=True converts it"):
        nc.convert(stack, NVFP4, only="7")
    table = {"": nc.recipe.Float8CurrentScaling(), "7": NVFP4, "6": NVFP4}
    assert set(kept(stack, table)) == {"7.up", "7.gate", "7.down"}


def test_what_a_stack_of_blocks_is() -> None:
    encoder_and_decoder = nn.ModuleDict(
        {"encoder": nn.ModuleList(blocks(4)), "decoder": nn.ModuleList(blocks(5))}
    )
    assert {name.rpartition(".")[0] for name in kept(encoder_and_decoder)} == {"encoder.3", "decoder.4"}
    assert kept(nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(blocks(4))})})) == [
        f"model.layers.3.{name}" for name in ("up", "gate", "down")
    ]
    assert kept(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))) == []  # layers are no blocks
    assert (
        kept(nn.Sequential(*blocks(4), nn.Linear(64, 64))) == []
    )  # nor what a sequence of several kinds has
    mixtures = nn.ModuleList(nn.ModuleList([Mixture(nn.Linear(32, 4)), Block(32)]) for _ in range(5))
    reasons = {one.name: one.reason for one in nc.convert(mixtures, NVFP4, dry_run=True).gemms}
    assert reasons["4.0.experts.0"].startswith("among the first and last") and not reasons["3.0.experts.3"]
    experts = nn.ModuleDict({"experts": nn.ModuleList(blocks(8))})
    assert kept(experts) == []
