"""Frozen layers that read one input quantize it once in eager code, and save nothing that no thin gradient reads.

``functional/test_inline.py`` has the same of graphs.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from convert.test_adapters import Lora
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.autograd import shared_input
from narrowcast.autograd.shared_input import memory_of_thread

CURRENT = QUANTIZED["current"]


class Block(nn.Module):
    """The linear layers of a transformer's block."""

    def __init__(self, recipe: Any, weights: Any, adapters: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {
            "q": (64, 64),
            "k": (64, 32),
            "v": (64, 32),
            "o": (32, 64),
            "gate": (64, 96),
            "up": (64, 96),
            "down": (96, 64),
        }
        self.layers = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
        self.to(DEVICE, torch.bfloat16).requires_grad_(False)
        nc.convert(self, recipe, weights=weights)
        if adapters:
            self.layers = nn.ModuleDict({name: Lora(layer, 4) for name, layer in self.layers.items()})  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        of = self.layers
        attended = of["k"](x) * of["v"](x) + of["q"](x)[..., :32]
        x = x + of["o"](attended)
        return x + of["down"](nn.functional.silu(of["gate"](x)) * of["up"](x))  # type: ignore[no-any-return]


def inputs() -> Tensor:
    return torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)


def counted(monkeypatch: Any, recipe: Any) -> list[int]:
    """Count what the input's quantizer encodes from now on."""
    quantizer = nc.recipe.linear_plan(recipe, "", True, False, module_type="linear").input.quantizer
    calls, encode = [0], type(quantizer)._encode

    def counting(self: Any, numerics: Any, x: Tensor, seed: Any) -> Any:
        calls[0] += self.rowwise_usage and not self.columnwise_usage
        return encode(self, numerics, x, seed)

    monkeypatch.setattr(type(quantizer), "_encode", counting)
    return calls


@pytest.mark.parametrize("name, weights", [("block", "stored"), ("mxfp8", "mxfp4")])
def test_a_block_quantizes_four_inputs_instead_of_seven(name: str, weights: Any, monkeypatch: Any) -> None:
    recipe = QUANTIZED[name]
    model, x = Block(recipe, weights, adapters=True), inputs()
    with nc.autocast(enabled=False):
        nothing = model(x)
    outs = []
    for shared in (False, True):
        calls = counted(monkeypatch, recipe)
        if not shared:
            monkeypatch.setattr("narrowcast.autograd.shared_input._can_share", lambda x: False)
        y = model(x.clone().requires_grad_() * 1.0)
        outs.append(y)
        of_weights = 7 if weights == "mxfp4" else 0
        assert calls[0] - of_weights == (4 if shared else 7)
        monkeypatch.undo()
    assert torch.equal(*outs) and not torch.equal(outs[0], nothing)


def test_an_input_that_changes_or_is_freed_is_not_shared() -> None:
    layer = nc.convert(nn.Sequential(nn.Linear(64, 32)).requires_grad_(False), CURRENT, weights="stored").to(
        DEVICE
    )
    x = inputs().float().requires_grad_() * 1.0
    first = layer(x)
    x.mul_(3.0)
    assert not torch.equal(layer(x), first)
    block = nc.convert(
        nn.Sequential(nn.Linear(64, 32)).requires_grad_(False), QUANTIZED["block"], weights="stored"
    )
    expected = block.to(DEVICE)(x.detach())
    assert torch.equal(layer(x), layer(x.detach())) and torch.equal(block(x), expected)
    memory = memory_of_thread()
    assert memory.last is not None and memory.last.inp() is x
    kept, alive = weakref.ref(memory.last.buffers[0]), [x]
    del x, expected, first
    freeing = threading.Thread(target=alive.clear)  # as a backward does
    freeing.start()
    freeing.join()
    gc.collect()
    assert memory.last is None and kept() is None
    static = inputs().float()
    first = layer(static)
    static.data.mul_(3.0)  # as a kernel does that raises no version
    assert not torch.equal(layer(static), first)


@pytest.mark.parametrize("weights", ["stored", "nvfp4"])
def test_only_inputs_of_thin_gemms_are_saved(weights: Any) -> None:
    model = Block(CURRENT, weights, adapters=True)
    codes = {
        b.data_ptr()
        for p in model.parameters()
        if hasattr(p, "get_data_tensors")
        for b in p.get_data_tensors()
        if b is not None
    }
    codes |= {p.data_ptr() for p in model.parameters()}
    x = inputs().requires_grad_(True)
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in codes:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    rows = x.shape[0] * x.shape[1]
    read = 64 + 32 + 64 + 96  # the inputs of the adapters, each once
    thin = 7 * 4
    operands = 3 * 32 + 3 * 96  # of the products and of silu between the layers
    scales = 0.05 * 2 * read * rows
    assert sum(saved.values()) <= 2 * rows * (read + thin + operands) + scales
    out.float().sum().backward()
    assert x.grad is not None


def test_a_view_of_all_of_an_input_is_that_input() -> None:
    x = inputs().requires_grad_() * 1
    for view in (x.view_as(x), x[:], x.view(x.shape)):
        assert shared_input._whole(view) is x
    for other in (x, x.transpose(1, 2), x[:1], x[:, 1:], x.view(-1, 64), x.view(torch.int16)):
        assert shared_input._whole(other) is other
    leaf = inputs()
    view = leaf.view_as(leaf)
    assert shared_input._whole(view) is view


def test_a_view_of_all_of_an_input_is_quantized_with_it(monkeypatch: Any) -> None:
    layers = [
        nn.Sequential(nn.Linear(64, 32)).to(DEVICE, torch.bfloat16).requires_grad_(False) for _ in range(2)
    ]
    for layer in layers:
        nc.convert(layer, CURRENT, weights="stored")
    x = inputs().requires_grad_() * 1.0
    calls = counted(monkeypatch, CURRENT)
    layers[0](x)
    layers[1](x.view_as(x))
    assert calls[0] == 1
