"""``parameters_split``: several named parameters compute, and learn, what one weight and one bias do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED, RECIPES
from torch import Tensor, nn

import narrowcast as nc

K = 48
SPLIT = {"query": 33, "key_": 7, "value": 32}  # a name may end with the underscore that is added
N = sum(SPLIT.values())
NAMES = ["query", "key", "value"]
MODULES = [nc.Linear, nc.LayerNormLinear]
modules = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)


def pair(module: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, Any]:
    """A split layer, and a whole one with the same values."""
    torch.manual_seed(1)
    split = module(K, N, device=DEVICE, params_dtype=dtype, parameters_split=SPLIT, **kwargs)
    whole = module(K, N, device=DEVICE, params_dtype=dtype, **kwargs)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for parameter in parts(split, kind):
                if kind == "bias":
                    parameter.normal_()
            if getattr(whole, kind) is not None:
                getattr(whole, kind).copy_(torch.cat(parts(split, kind)))
    return split, whole


def parts(module: nn.Module, kind: str) -> list[Any]:
    return [p for p in (getattr(module, f"{name}_{kind}") for name in NAMES) if p is not None]


def tokens(seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(24, K, generator=generator).to(DEVICE, dtype).requires_grad_(True)


def train(module: Any, x: Tensor, name: str, forward: Any = None, **kwargs: Any) -> Tensor:
    torch.manual_seed(7)
    recipe = RECIPES[name]
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        out = (module if forward is None else forward)(x, **kwargs)
    out.float().square().sum().backward()
    return out.detach()


def equal(ours: Tensor | None, theirs: Tensor | None) -> bool:
    assert ours is not None and theirs is not None
    return torch.equal(ours, theirs)


def assert_same_gradients(split: Any, whole: Any) -> None:
    for kind in ("weight", "bias"):
        if getattr(whole, kind) is not None:
            assert torch.equal(torch.cat([p.grad for p in parts(split, kind)]), getattr(whole, kind).grad)
            assert getattr(whole, kind).grad.abs().sum() > 0


@pytest.mark.covering
@modules
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_whole_layer(module: Any, name: str, bias: bool) -> None:
    split, whole = pair(module, bias=bias)
    x, twin = tokens(), tokens()
    assert torch.equal(train(split, x, name), train(whole, twin, name))
    assert equal(x.grad, twin.grad)
    assert_same_gradients(split, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    split, whole = pair(nc.Linear, dtype)
    assert torch.equal(
        train(split, tokens(dtype=dtype), "current"), train(whole, tokens(dtype=dtype), "current")
    )
    assert_same_gradients(split, whole)


@pytest.mark.covering
@modules
@pytest.mark.parametrize("name", ["none", "current"])
@pytest.mark.parametrize("how", ["adjacent", "apart", "compiled"])
def test_delayed_weight_gradient(module: Any, name: str, how: str) -> None:
    split, whole = pair(module, delay_wgrad_compute=True)
    if how == "apart":
        split.key_weight = nn.Parameter(split.key_weight.detach().clone())
    forward = torch.compile(split, fullgraph=True, backend="aot_eager") if how == "compiled" else None
    for seed in (2, 3):
        train(split, tokens(seed), name, forward)
        train(whole, tokens(seed), name)
    assert split.query_weight.grad is None and split.query_bias.grad is None
    for _ in range(2):
        split.backward_dw()
        whole.backward_dw()
    assert_same_gradients(split, whole)


def test_one_buffer_and_no_copy() -> None:
    split, _ = pair(nc.Linear)
    weights = parts(split, "weight")
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert split._whole("weight").data_ptr() == weights[0].data_ptr()
    assert [weight.shape for weight in weights] == [(33, K), (7, K), (32, K)]


@modules
def test_honours_parameters_that_were_replaced(module: Any) -> None:
    split, whole = pair(module)
    split.key_weight = nn.Parameter(torch.ones_like(split.key_weight))
    with torch.no_grad():
        whole.weight[33:40] = 1
    assert torch.equal(train(split, tokens(), "current"), train(whole, tokens(), "current"))
    assert_same_gradients(split, whole)


@pytest.mark.parametrize("name", QUANTIZED)
def test_microbatch_cache_dies_with_a_part(name: str) -> None:
    split, whole = pair(nc.Linear)
    train(split, tokens(), name, is_first_microbatch=True)
    assert split._fp8_workspaces["weight"]
    kept = train(split, tokens(), name, is_first_microbatch=False)
    train(whole, tokens(), name, is_first_microbatch=True)
    assert torch.equal(kept, train(whole, tokens(), name, is_first_microbatch=False))
    split.value_weight = nn.Parameter(split.value_weight.detach().clone())
    assert not split._fp8_workspaces["weight"]


@modules
def test_state_dict(module: Any) -> None:
    split, _ = pair(module)
    state = split.state_dict()
    assert [key for key in state if "layer_norm" not in key and "delayed" not in key] == [
        *(f"{name}_weight" for name in NAMES),
        *(f"{name}_bias" for name in NAMES),
    ]
    torch.manual_seed(9)
    other = module(K, N, device=DEVICE, parameters_split=SPLIT)
    other.load_state_dict(state)
    assert torch.equal(train(other, tokens(), "current"), train(split, tokens(), "current"))


def test_frozen_part() -> None:
    split, whole = pair(nc.Linear, delay_wgrad_compute=True)
    split.key_weight.requires_grad_(False)
    for layer in (split, whole):
        train(layer, tokens(), "current")
        layer.backward_dw()
    assert split.key_weight.grad is None
    assert torch.equal(split.value_weight.grad, whole.weight.grad[40:])


def test_equal_parts_by_name() -> None:
    layer = nc.Linear(K, 12, device=DEVICE, parameters_split=("a", "b_", "c"))
    assert [name for name, _ in layer.named_parameters()] == [
        *("a_weight", "b_weight", "c_weight"),
        *("a_bias", "b_bias", "c_bias"),
    ]
    assert layer.b_weight.shape == (4, K) and layer.b_bias.shape == (4,)


@modules
@pytest.mark.parametrize("name", RECIPES)
def test_no_tokens(module: Any, name: str) -> None:
    split, _ = pair(module)
    x = torch.randn(2, 0, K, device=DEVICE, requires_grad=True)
    assert train(split, x, name).shape == (2, 0, N)
    for kind in ("weight", "bias"):
        assert all(p.grad.shape == p.shape and not p.grad.any() for p in parts(split, kind))


def test_return_bias() -> None:
    split, whole = pair(nc.Linear, return_bias=True)
    (ours, bias), (theirs, whole_bias) = split(tokens()), whole(tokens())
    assert torch.equal(ours, theirs) and torch.equal(bias, whole_bias)


@modules
@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        ((), ValueError, "empty"),
        ({}, ValueError, "empty"),
        (("a", "b", "c"), ValueError, "3 names"),
        ({"a": 8, "b": 9}, ValueError, "sum to out_features=16"),
        ({"a": 16, "b": 0}, ValueError, "positive"),
        (("a", "a_"), ValueError, "every name once"),
        ("ab", TypeError, "'ab'"),
        (2, TypeError, "is 2"),
    ],
)
def test_bad_split(module: Any, split: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        module(K, 16, device=DEVICE, parameters_split=split)


@modules
def test_what_does_not_go_together(module: Any) -> None:
    with pytest.raises(RuntimeError, match="meta"):
        module(K, 16, device="meta", parameters_split=("a", "b"))
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation"):
        module(K, 16, device=DEVICE, parameters_split=("a", "b"), fuse_wgrad_accumulation=True)
    with nc.quantized_model_init(recipe=RECIPES["current"]), pytest.raises(RuntimeError, match="quantized"):
        module(K, 16, device=DEVICE, parameters_split=("a", "b"))
