"""``torch.set_default_dtype`` around a program changes no bit of it, where its own tensors have a dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recipes import QUANTIZED
from torch import Tensor, nn

import narrowcast as nc

PLACE: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
WORDS = torch.arange(24) % 11


@pytest.fixture(autouse=True)
def back() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(33, 48, **PLACE), nn.GELU(), nn.Linear(48, 33, **PLACE))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    for _ in range(steps):
        model(numbers(24, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]


def adam(**options: Any) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        model = plain()
        if "weight_codes" in options:
            options["weight_codes"] = nc.set_recipe(nc.convert(model, "current"), "current")
        return trained(model, nc.optimizers.FusedAdam(model.parameters(), lr=1e-2, **options))

    return run


def counted() -> list[Tensor]:
    """Steps that bf16 cannot count."""
    weight = nn.Parameter(numbers(3, 5))
    optimizer = nc.optimizers.FusedAdam([weight], lr=1e-3)
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.state[weight]["step"].item() == 300
    return [weight.detach()]


def recipe(name: str) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        model = nc.convert(plain(), QUANTIZED[name])
        return trained(model, nc.optimizers.FusedAdam(model.parameters(), lr=1e-2))

    return run


def stored() -> list[Tensor]:
    model = nc.convert(plain().requires_grad_(False), "current", weights="nvfp4").requires_grad_(True)
    return trained(model, nc.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True))


def watched() -> list[Tensor]:
    model = nc.convert(plain(), QUANTIZED["delayed"])
    with nc.watch(model, every=1) as watch:
        for _ in range(2):
            model(numbers(24, 33)).square().mean().backward()
            watch.step()
        rows = [(r.amax, r.underflow, r.saturation, r.sqnr) for r in watch.latest()]
    return [torch.tensor(rows, dtype=torch.float64)]


def bisected() -> list[Tensor]:
    model = nc.convert(plain(), "current")
    found = nc.bisect(model, numbers(24, 33), loss=lambda out: out.square().mean())
    return [torch.tensor(sorted(layer.gradient for layer in found.layers), dtype=torch.float64)]


def block() -> list[Tensor]:
    layer = nc.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, **PLACE)
    nc.set_recipe(layer, QUANTIZED["delayed"])
    x = numbers(6, 2, 32).requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def attention() -> list[Tensor]:
    q, k, v = (numbers(6, 2, 3, 16).requires_grad_() for _ in range(3))
    core = nc.DotProductAttention(3, 16, attention_dropout=0.0)
    out = core(q, k, v, core_attention_bias_type="alibi")
    frequencies = nc.RotaryPositionEmbedding(16)(6)
    turned = nc.apply_rotary_pos_emb(q, frequencies)
    return [out.detach(), turned.detach(), *torch.autograd.grad(out.square().sum() + turned.sum(), [q, k, v])]


def experts() -> list[Tensor]:
    router = nc.MoERouter(32, 4, 2, **PLACE)
    grouped = nc.GroupedLinear(4, 32, 32, **PLACE)
    x = numbers(24, 32).requires_grad_()
    routed = router(x)
    with nc.autocast(recipe=QUANTIZED["current"]):
        out = grouped(x, [7, 0, 16, 1])
    loss = out.square().sum()
    return [out.detach(), *router.state_dict().values(), *_tensors(routed), *torch.autograd.grad(loss, x)]


def losses() -> list[Tensor]:
    head, x = nc.Linear(33, 11, bias=False, **PLACE), numbers(24, 33).requires_grad_()
    found = nc.losses.linear_cross_entropy(x, head.weight, WORDS)
    again = nc.losses.linear_cross_entropy(x, head.weight, WORDS, label_smoothing=0.1)
    return [
        *_tensors(found),
        *_tensors(again),
        *torch.autograd.grad(found.sum(), [x, head.weight]),
    ]


def operations() -> list[Tensor]:
    model = nc.ops.Sequential(nc.ops.RMSNorm(33, **PLACE), nc.ops.Linear(33, 64, **PLACE), nc.ops.SwiGLU())
    x = numbers(24, 33).requires_grad_()
    with nc.autocast(recipe=QUANTIZED["delayed"]):
        for _ in range(2):
            out = model(x)
            out.square().sum().backward()
    return [out.detach(), *(p.grad for p in (x, *model.parameters()) if p.grad is not None)]


def initialized() -> list[Tensor]:
    with nc.quantized_model_init(recipe=QUANTIZED["current"]):
        layer = nc.Linear(33, 48, **PLACE)
    return [layer.weight.detach().dequantize(), *copy.deepcopy(layer).state_dict().values()]


def _tensors(found: Any) -> list[Tensor]:
    values = found if isinstance(found, (tuple, list)) else [found]
    return [x.detach() for x in values if isinstance(x, Tensor)]


PROGRAMS = {
    "adam": adam(),
    "adam, masters": adam(master_weights=True, master_weight_dtype=torch.float16),
    "adam, int8": adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.int8),
    "adam, e4m3": adam(exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16),
    "adam, capturable": adam(capturable=True),
    "adam, codes": adam(weight_codes=None),
    **{name: recipe(name) for name in QUANTIZED},
    **{f.__name__: f for f in (counted, stored, watched, bisected, block, attention, experts, losses)},
    **{f.__name__: f for f in (operations, initialized)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_default_dtype_decides_nothing(name: str) -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        results.append(PROGRAMS[name]())
    for others in results[1:]:
        for wanted, found in zip(results[0], others, strict=True):
            assert found.dtype == wanted.dtype and found.shape == wanted.shape
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
