"""``Sequential``: editing, grouping, extra tensors and keyword arguments, state, compiled with modules between."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from ops_checks import check, check_compiled, make_inputs
from recipes import DEVICE, RECIPES
from torch import nn

import narrowcast as nc
from narrowcast.ops import (
    AddExtraInput,
    Bias,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    OperationFuser,
    Sequential,
)


class Power(ConstantScale):
    """Takes a keyword argument."""

    def op_forward_compute(self, input_: Any, *, times: int = 1, **kwargs: Any) -> Any:
        return input_ * self.scale**times, ()

    def op_forward_save_ctx(self, ctx: Any, *args: Any, times: int = 1, **kwargs: Any) -> None:
        ctx.factor = self.scale**times

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return grad_output * ctx.factor, ()


def kinds(block: Sequential) -> list[Any]:
    return [
        [type(op).__name__ for op in group.basic_ops]
        if isinstance(group, OperationFuser)
        else type(group).__name__
        for group in block.groups()
    ]


def test_adjacent_operations_form_groups() -> None:
    block = Sequential(
        nn.Tanh(), Bias(7), Identity(), nn.Linear(7, 7), nn.ReLU(), ConstantScale(2.0), Sequential(Identity())
    ).to(DEVICE)
    assert kinds(block) == ["Tanh", ["Bias", "Identity"], "Linear", "ReLU", ["ConstantScale"], "Sequential"]
    assert block.groups() is block.groups()
    x = torch.randn(3, 7, device=DEVICE)
    assert torch.equal(block(x), 2 * block[3](torch.tanh(x)).relu())


def test_editing_changes_the_groups() -> None:
    a, b, c = Bias(7), ConstantScale(2.0), nn.Tanh()
    block = Sequential(a)
    assert kinds(block) == [["Bias"]]
    block.append(b).extend([c, Identity()])
    assert kinds(block) == [["Bias", "ConstantScale"], "Tanh", ["Identity"]] and len(block) == 4
    block.insert(1, c)
    assert kinds(block) == [["Bias"], "Tanh", ["ConstantScale"], "Tanh", ["Identity"]]
    assert block.pop(1) is c
    del block[2]
    assert kinds(block) == [["Bias", "ConstantScale", "Identity"]]
    block[1] = c
    assert kinds(block) == [["Bias"], "Tanh", ["Identity"]] and block[0] is a
    block += Sequential(b)
    assert kinds(block) == [["Bias"], "Tanh", ["Identity", "ConstantScale"]]
    joined = block + Sequential(Identity())
    assert type(joined) is Sequential and kinds(joined)[-1] == ["Identity", "ConstantScale", "Identity"]
    part = block[2:]
    assert type(part) is Sequential and kinds(part) == [["Identity", "ConstantScale"]]
    setattr(block, "1", Identity())
    assert kinds(block) == [["Bias", "Identity", "Identity", "ConstantScale"]]
    with pytest.raises(ValueError, match="cannot add an Identity to a Sequential"):
        block + Identity()
    named = Sequential(OrderedDict(first=a, second=b))
    assert named.first is a and kinds(named) == [["Bias", "ConstantScale"]]
    assert torch.equal(Sequential()(torch.ones(2)), torch.ones(2))


def test_editing_is_noticed_by_compiled_code() -> None:
    block, x = Sequential(Bias(7), ConstantScale(2.0)), torch.randn(3, 7, device=DEVICE)
    forward = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(forward(x), 2 * x)
    block[1] = ConstantScale(3.0)
    assert torch.equal(forward(x), 3 * x)
    block.append(nn.Tanh())
    assert torch.equal(forward(x), torch.tanh(3 * x))


def extras() -> Sequential:
    return Sequential(
        AddExtraInput(),
        MakeExtraOutput(),
        nn.Tanh(),
        Identity(),
        AddExtraInput(),
        MakeExtraOutput(),
        nn.Sigmoid(),
    )


def test_extra_tensors_across_groups() -> None:
    block = extras()
    a, b, c = make_inputs([(5, 7)] * 3, dtype=torch.float32)
    out, first, second = block(a, b, c)
    assert torch.equal(first, a + b) and torch.equal(second, torch.tanh(a + b) + c)
    assert torch.equal(out, torch.sigmoid(second))
    with pytest.raises(ValueError, match="got 1 extra inputs, the operations take 2"):
        block(a, b)
    with pytest.raises(ValueError, match="got 1 extra inputs, the operations take 0"):
        Sequential(nn.Tanh())(a, b)


def test_extra_tensors_across_groups_compile() -> None:
    check_compiled(extras(), [(5, 7)] * 3, dtype=torch.float32, dynamic=True)


def channel_past_a_module() -> Sequential:
    begin, end = MakeExtraOutput(), AddExtraInput()
    begin.set_extra_output_channel(0, "skip", output_to_caller=False)
    end.set_extra_input_channel(0, "skip")
    again = AddExtraInput()
    again.set_extra_input_channel(0, "skip")
    return Sequential(AddExtraInput(), begin, nn.Tanh(), Bias(7), end, nn.Sigmoid(), MakeExtraOutput(), again)


def test_a_channel_leads_past_other_modules() -> None:
    block, (x, extra) = channel_past_a_module(), make_inputs([(5, 7)] * 2, dtype=torch.float32)
    out, second = block(x, extra)
    skip = x + extra
    assert torch.equal(second, torch.sigmoid(torch.tanh(skip) + skip)) and torch.equal(out, second + skip)
    check(channel_past_a_module, [(5, 7)] * 2, dtype=torch.float32)
    first, last = AddExtraInput(), MakeExtraOutput()
    first.set_extra_input_channel(0, "later")
    last.set_extra_output_channel(0, "later")
    with pytest.raises(ValueError, match="which no operation in front of it gives"):
        Sequential(first, nn.Tanh(), last)(x)


def test_the_last_operation_that_gives_a_channel_counts() -> None:
    ops = [MakeExtraOutput(), MakeExtraOutput(), AddExtraInput()]
    for op in ops[:2]:
        op.set_extra_output_channel(0, "skip", output_to_caller=False)
    ops[2].set_extra_input_channel(0, "skip")
    x = torch.randn(3, 7)
    assert torch.equal(
        Sequential(ops[0], nn.Tanh(), ops[1], nn.ReLU(), ops[2])(x), x.tanh().relu() + x.tanh()
    )


def test_keyword_arguments_by_operation_or_number() -> None:
    first, last, x = Power(2.0), Power(3.0), torch.ones(2, requires_grad=True)
    block = Sequential(Identity(), first, nn.Identity(), last)
    assert block(x).sum() == 12
    assert block(x, op_kwargs={first: {"times": 2}, 2: {"times": 3}}).sum() == 2 * 4 * 27
    (grad,) = torch.autograd.grad(block(x, op_kwargs={last: {"times": 2}}).sum(), x)
    assert torch.equal(grad, torch.full((2,), 18.0))
    assert first(x, times=3).sum() == 16
    forward = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert forward(x, op_kwargs={first: {"times": 2}, 2: {"times": 3}}).sum() == 2 * 4 * 27


@pytest.mark.parametrize(
    "key, error, message",
    [
        (3, KeyError, "op_kwargs has key 3; there are 3 basic operations"),
        (-1, KeyError, "op_kwargs has key -1"),
        ("1", ValueError, "op_kwargs has a str as key"),
        (Power(2.0), ValueError, "op_kwargs has a Power as key"),
        (nn.Tanh(), ValueError, "op_kwargs has a Tanh as key"),
    ],
)
def test_wrong_keyword_arguments(key: Any, error: type, message: str) -> None:
    block = Sequential(Identity(), nn.Tanh(), Power(2.0), Identity())
    with pytest.raises(error, match=message):
        block(torch.ones(2), op_kwargs={key: {}})
    with pytest.raises(ValueError, match="names operation 1 twice"):
        block(torch.ones(2), op_kwargs={1: {}, block[2]: {}})


def test_state_is_plain_and_the_module_copies() -> None:
    block, x = (
        Sequential(Bias(7, device=DEVICE), nn.Tanh(), ConstantScale(2.0)),
        torch.randn(3, 7, device=DEVICE),
    )
    with torch.no_grad():
        block[0].bias.normal_()
    expected = block(x)
    assert list(block.state_dict()) == ["0.bias"]
    stored = io.BytesIO()
    torch.save(block.state_dict(), stored)
    stored.seek(0)
    loaded = Sequential(Bias(7, device=DEVICE), nn.Tanh(), ConstantScale(2.0))
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    for other in (loaded, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x), expected)
    copied = copy.deepcopy(block)
    with torch.no_grad():
        copied[0].bias.zero_()
    assert torch.equal(block(x), expected) and not torch.equal(copied(x), expected)
    plain = torch.nn.Sequential(nn.Identity(), nn.Tanh())
    assert type(plain + Sequential(Identity())) is torch.nn.Sequential


@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
def test_modules_of_this_library_between(name: str) -> None:
    def make() -> Sequential:
        return Sequential(
            Bias(32, device=DEVICE, dtype=torch.bfloat16),
            nc.Linear(32, 48, params_dtype=torch.bfloat16, device=DEVICE),
            ConstantScale(0.5),
            nn.Tanh(),
        )

    check(make, [(16, 32)], RECIPES[name])
