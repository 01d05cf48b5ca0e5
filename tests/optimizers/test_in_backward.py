"""Steps during the backward: the bits of steps after it, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.optimizers import FusedAdam, step_in_backward

CODES = torch.int8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1),
    "remainders": lambda p: FusedAdam(
        p, 1e-2, master_weights=True, store_param_remainders=True, exp_avg_dtype=CODES, exp_avg_sq_dtype=CODES
    ),
    "stochastic": lambda p: FusedAdam(p, 1e-2, stochastic_rounding=True, exp_avg_dtype=CODES),
}


class Model(nn.Module):
    """Two blocks, of which the second does not run in every step, between an embedding and its own head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        place: dict[str, Any] = {"dtype": torch.bfloat16}
        self.embedding = nn.Embedding(7, 63, **place)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(63, 63, **place), nn.GELU(), nn.Linear(63, 63, **place)) for _ in range(2)
        )
        self.norm = nn.RMSNorm(63, **place)
        self.most = 0

    def forward(self, tokens: Tensor, both: bool = True) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks if both else self.blocks[:1]:
            x = x + nc.checkpoint(block, x)
        x.register_hook(lambda grad: None)
        return (self.norm(x) @ self.embedding.weight.t()).float().logsumexp(-1).mean()

    def held(self) -> int:
        """Return the elements of gradients that are there."""
        return sum(p.grad.numel() for p in self.parameters() if p.grad is not None)


def run(
    name: str, inside: bool, steps: int = 4, resumed: bool = False
) -> tuple[Model, torch.optim.Optimizer, int]:
    """Return a trained model, its optimizer, and the most elements of gradients that a hook saw."""
    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    most = [0]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: most.__setitem__(0, max(most[0], model.held())))
    if inside:
        step_in_backward(optimizer, model.blocks)
    for index in range(steps):
        if resumed and index == 2:
            weights, state = model.state_dict(), optimizer.state_dict()
            model = Model()
            model.load_state_dict(weights)
            optimizer = OPTIMIZERS[name](model.parameters())
            optimizer.load_state_dict(state)
            step_in_backward(optimizer, model.blocks)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + index)
        model(torch.arange(7) if index % 2 else torch.tensor([1, 1, 5]), both=index != 1).backward()
        if inside:
            assert not model.held()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, most[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_steps_after_the_backward(name: str) -> None:
    (after, theirs, all_of_them), (inside, ours, most) = run(name, False), run(name, True)
    assert all_of_them == sum(p.numel() for p in after.parameters()) and most < 0.6 * all_of_them
    for p, q in zip(after.parameters(), inside.parameters(), strict=True):
        assert torch.equal(p, q)
    expected, given = theirs.state_dict(), ours.state_dict()
    assert expected["param_groups"] == given["param_groups"]
    assert expected["state"].keys() == given["state"].keys()
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(value, given["state"][index][key]), (index, key)


def test_a_resumed_run_has_the_same_bits() -> None:
    whole, resumed = run("remainders", True)[0], run("remainders", True, resumed=True)[0]
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_exception_in_the_backward_leaves_the_rest_to_the_loop() -> None:
    """Parameters whose gradients came before it are stepped once, as by a loop that goes on with what there is."""
    models = Model(), Model()
    for index, model in enumerate(models):
        optimizer = OPTIMIZERS["remainders"](model.parameters())
        if index:
            step_in_backward(optimizer, model.blocks)
        for fails in (False, True, False):
            weight = model.blocks[0][0].weight  # type: ignore[index]
            hook = weight.register_hook(lambda grad: 1 / 0) if fails else None
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                model(torch.arange(7)).backward()
            if hook is not None:
                hook.remove()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_parameter_shared_by_reentrant_checkpoints_raises() -> None:
    layer = nn.Linear(7, 7)
    optimizer = OPTIMIZERS["SGD"](layer.parameters())
    step_in_backward(optimizer, [layer])
    x = torch.randn(3, 7, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False for checkpoints that share"):
        checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True).sum().backward()  # type: ignore[union-attr]


def test_what_is_not_possible_raises() -> None:
    model = Model()
    optimizer = OPTIMIZERS["FusedAdam"](model.parameters())
    steps = step_in_backward(optimizer, model.blocks)
    model(torch.arange(7)).backward()
    with pytest.raises(RuntimeError, match=r"do not accumulate; call optimizer\.step\(\)"):
        model(torch.arange(7)).backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.arange(7))).backward()
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]  # as a scaler does
    with pytest.raises(RuntimeError, match="loss was scaled"):
        optimizer.step()
    steps.remove()
    del optimizer.grad_scale  # type: ignore[attr-defined]
    model(torch.arange(7)).backward()
    assert model.held()
    with pytest.raises(TypeError, match="pass an optimizer"):
        step_in_backward(model, model.blocks)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parts"):
        step_in_backward(optimizer, model.parameters())  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="^parts has a Linear with no parameter of the optimizer; pass blocks"
    ):
        step_in_backward(optimizer, [nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="LBFGS calls the model several times"):
        step_in_backward(torch.optim.LBFGS(model.parameters()), model.blocks)
    coded = FusedAdam(model.parameters(), weight_codes=model)
    with pytest.raises(ValueError, match="weight_codes are written"):
        step_in_backward(coded, model.blocks)
    decoupled = FusedAdam(model.parameters(), use_decoupled_grad=True)
    with pytest.raises(ValueError, match="use_decoupled_grad=False"):
        step_in_backward(decoupled, model.blocks)
    for module in (nc.Linear, nc.ops.BasicLinear):
        option = "fuse_wgrad_accumulation" if module is nc.Linear else "accumulate_into_main_grad"
        fused: Any = module(31, 7, device="cpu", **{option: True})
        for assigned in (False, True):
            if assigned:
                fused.weight.main_grad = torch.zeros(7, 31)
            with pytest.raises(
                ValueError, match=r"\(7, 31\) is added to its main_grad.*fuse_wgrad_accumulation"
            ):
                step_in_backward(torch.optim.SGD(fused.parameters(), lr=0.1), [fused])
