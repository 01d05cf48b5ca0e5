"""What Megatron-LM takes from Transformer Engine to recompute and to capture by means of its own."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.compat.base import is_ub_initialized, using_cublasmp_backend
from narrowcast.compat.collectives import is_nccl_ep_available
from narrowcast.compat.graph import (
    make_weak_ref,
    restore_fp8_tensors,
    save_fp8_tensors,
    set_capture_end,
    set_capture_start,
)
from narrowcast.compat.recompute import activation_recompute_forward

RECIPE = nc.recipe.DelayedScaling(amax_history_len=3)


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(nc.LayerNormLinear(48, 80, device="cpu"), nc.Linear(80, 48, device="cpu"))


def assert_same_state(one: torch.nn.Module, other: torch.nn.Module) -> None:
    mine, yours = one.state_dict(), other.state_dict()
    assert mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


class Recomputed(torch.autograd.Function):
    """As Megatron's CheckpointWithoutOutput: a forward without gradients, and one with them in the backward."""

    @staticmethod
    def forward(ctx: Any, block: torch.nn.Module, x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        ctx.block, ctx.seen = block, seen
        ctx.save_for_backward(x)
        ctx.recipe = nc.compat.FP8GlobalStateManager.get_fp8_recipe()
        context = activation_recompute_forward(activation_recompute=True, recompute_phase=False)
        with torch.no_grad(), context:
            seen.append((nc.is_fp8_activation_recompute_enabled(), nc.in_fp8_activation_recompute_phase()))
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        context = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        with torch.enable_grad(), nc.autocast(recipe=ctx.recipe), context:
            ctx.seen.append(
                (nc.is_fp8_activation_recompute_enabled(), nc.in_fp8_activation_recompute_phase())
            )
            out = ctx.block(x)
        torch.autograd.backward(out, grad)
        return None, x.grad, None


def test_a_recomputed_forward_trains_as_a_plain_one() -> None:
    recomputed, plain, seen = network(), network(), []
    for step in range(4):
        x = torch.randn(32, 48) * 2**step
        grads = []
        for model in (recomputed, plain):
            optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), x.clone().requires_grad_()
            with nc.autocast(recipe=RECIPE):
                out = Recomputed.apply(model, own, seen) if model is recomputed else model(own)
            out.square().mean().backward()
            grads.append([own.grad, *(parameter.grad for parameter in model.parameters())])
            optimizer.step()
        assert all(map(torch.equal, *grads))
        assert_same_state(recomputed, plain)
    assert seen == 4 * [(True, False), (True, True)]
    assert not nc.is_fp8_activation_recompute_enabled() and not nc.in_fp8_activation_recompute_phase()


def test_a_context_without_recomputation_says_so() -> None:
    asks = activation_recompute_forward()(nc.is_fp8_activation_recompute_enabled)
    with nc.autocast(recipe=RECIPE), activation_recompute_forward(True):
        assert nc.is_fp8_activation_recompute_enabled() and not asks()
        assert nc.is_fp8_activation_recompute_enabled() and not nc.in_fp8_activation_recompute_phase()


@pytest.mark.parametrize("begun", [False, True])
def test_a_capture_leaves_the_state_of_delayed_scaling(begun: bool) -> None:
    """A warm-up and the captured forward come before, its backward behind the state is put back, as in Megatron."""
    captured, plain = network(), network()
    x = torch.randn(32, 48)

    def run(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=RECIPE):
            return model(x)

    for model in (captured, plain) if begun else ():
        run(model, x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    kept = save_fp8_tensors([captured], RECIPE)
    set_capture_start()
    captured[0].weight.main_grad = torch.ones(80, 48)
    run(captured, 64 * x).sum().backward()
    loss = run(captured, 64 * x).sum()
    restore_fp8_tensors([captured], kept)
    loss.backward()
    restore_fp8_tensors([captured], kept)
    set_capture_end()
    if begun:
        assert_same_state(captured, plain)
    assert torch.equal(run(captured, x), run(plain, x))
    assert save_fp8_tensors([captured], nc.recipe.Float8CurrentScaling()) is None
    restore_fp8_tensors([captured], None)


def test_what_a_saved_state_leaves_alone() -> None:
    model = network()
    model.register_buffer("steps", torch.zeros(1))
    model[0].weight.main_grad = torch.zeros(80, 48)
    kept = save_fp8_tensors([model], RECIPE)
    model.steps.add_(1)
    model[0].weight.main_grad.add_(1)
    restore_fp8_tensors([model], kept)
    assert model.steps == 1 and model[0].weight.main_grad.eq(1).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weak_references(device: str) -> None:
    x = torch.randn(6, 10, device=device)
    given = {"a": [x[1:, ::3], x.bfloat16().t()], "b": (x[:0], None, 2, 0.5, True)}
    weak = make_weak_ref(given)
    for mine, yours in zip((*weak["a"], weak["b"][0]), (*given["a"], given["b"][0])):
        assert torch.equal(mine, yours) and mine.dtype == yours.dtype and mine.stride() == yours.stride()
        assert mine.data_ptr() == yours.data_ptr() and (mine is yours) == (
            device == "cpu" or not mine.numel()
        )
    assert weak["b"][1:] == given["b"][1:]
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        held = make_weak_ref(torch.empty(1 << 20, device=device))
        assert torch.cuda.memory_allocated() == before and held.numel() == 1 << 20
    with pytest.raises(TypeError, match="make_weak_ref takes tensors, numbers and None.*got 'text'"):
        make_weak_ref(["text"])


def test_a_recipe_takes_what_megatron_gives_it() -> None:
    class TEDelayedScaling(nc.recipe.DelayedScaling):
        def __init__(self, margin: int) -> None:
            nothing = (False, False, False)
            options: Any = {"params_dtype": torch.bfloat16, "device": 0, "override_linear_precision": nothing}
            super().__init__(margin=margin, **options)

    recipe = TEDelayedScaling(1)
    assert recipe.margin == 1 and pickle.loads(pickle.dumps(nc.recipe.DelayedScaling(1))).margin == 1
    assert dataclasses.replace(RECIPE, margin=2) == nc.recipe.DelayedScaling(2, amax_history_len=3)
    assert nc.Linear(16, 16, recipe=recipe, device="cpu")(torch.ones(4, 16)).shape == (4, 16)
    with pytest.raises(
        NotImplementedError, match=r"override_linear_precision=\(False, False, True\)\): leave it"
    ):
        nc.recipe.DelayedScaling(override_linear_precision=(False, False, True))
    with pytest.raises(NotImplementedError, match="override_linear_precision=True"):
        nc.recipe.DelayedScaling(override_linear_precision=True)


@pytest.mark.parametrize("kind", [nc.LayerNormLinear, nc.LayerNormMLP])
def test_a_layer_says_how_it_normalizes(kind: Any) -> None:
    """Megatron makes operations of its layers' parts."""
    layer = kind(16, 32, eps=1e-3, normalization="RMSNorm", zero_centered_gamma=True, device="cpu")
    assert (layer.normalization, layer.eps, layer.zero_centered_gamma) == ("RMSNorm", 1e-3, True)


def test_questions_are_answered() -> None:
    assert not is_nccl_ep_available() and not is_ub_initialized() and not using_cublasmp_backend()


def test_what_its_random_module_imports_is_there() -> None:
    nc.compat.install_transformer_engine()
    try:
        distributed = importlib.import_module("transformer_engine.pytorch.distributed")
        assert distributed.activation_recompute_forward is activation_recompute_forward
    finally:
        nc.compat.uninstall_transformer_engine()
