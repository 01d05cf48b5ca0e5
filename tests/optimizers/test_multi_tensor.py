"""Functions over lists of tensors against torch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowcast import optimizers as room
from narrowcast.reference.adam import join, split
from narrowcast.testing import assert_close

apply = room.multi_tensor_applier


def tensors(seed: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((5, 7), (3,))]


def flag(device: Any, value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def test_scale_and_norms(device: torch.device) -> None:
    given, out, noop = tensors(0, device=device), tensors(1, torch.bfloat16, device), flag(device)
    apply(room.multi_tensor_scale, noop, [given, out], 0.5)
    assert all(torch.equal(o, (g * 0.5).bfloat16()) for g, o in zip(given, out))
    apply(room.multi_tensor_scale_tensor, noop, [given, out], torch.tensor(2.0, device=device))
    assert all(torch.equal(o, (g * 2).bfloat16()) for g, o in zip(given, out))
    norms = torch.stack([g.norm() for g in given])
    total, each = apply(room.multi_tensor_l2norm, noop, [given], True)
    assert_close(each, norms, "fp32_sum_order")
    assert_close(total, norms.norm().view(1), "fp32_sum_order")
    inverse = torch.tensor([0.25], device=device)
    assert_close(
        apply(room.multi_tensor_unscale_l2norm, noop, [given], inverse)[0], total / 4, "fp32_sum_order"
    )
    assert apply(room.multi_tensor_l2norm, noop, [given])[1].numel() == 0
    assert noop.item() == 0
    given[1][0] = float("inf")
    for function, lists, *arguments in (
        (room.multi_tensor_scale, [given, out], 1.0),
        (room.multi_tensor_l2norm, [given]),
    ):
        noop.zero_()
        apply(function, noop, lists, *arguments)
        assert noop.item() == 1


@pytest.mark.parametrize("kind", ["plain", "master", "remainder", "capturable"])
@pytest.mark.parametrize("mode", [0, 1])
def test_adam(mode: int, kind: str, device: torch.device) -> None:
    masters = tensors(0, device=device)
    twins = [nn.Parameter(m.clone()) for m in masters]
    reference = (torch.optim.Adam, torch.optim.AdamW)[mode](twins, lr=0.1, weight_decay=0.2, fused=True)
    first, second = ([torch.zeros_like(m) for m in masters] for _ in range(2))
    params = [m.bfloat16() for m in masters] if kind in ("master", "remainder") else masters
    extra: list[list[Tensor]] = {"master": [masters], "remainder": []}.get(kind, [])
    function: Any = room.multi_tensor_adam
    if kind == "remainder":
        halves = [split(m) for m in masters]
        params, extra = [h for h, _ in halves], [[low for _, low in halves]]
        function = room.multi_tensor_adam_param_remainder
    for step in (1, 2, 3):
        grads = tensors(step, device=device)
        lists, noop = [grads, params, first, second, *extra], flag(device)
        rate, number, tail = 0.1, step, ()
        if kind == "capturable":
            function = room.multi_tensor_adam_capturable
            lists[0] = [4 * g for g in grads]
            tail = (torch.tensor(0.25, device=device),)
            rate, number = (
                torch.tensor(0.1, device=device),
                torch.tensor([step], dtype=torch.int32, device=device),
            )
        arguments = (rate, 0.9, 0.999, 1e-8, number, mode, 1, 0.2, *tail)
        apply(function, noop, lists, *arguments)
        apply(function, flag(device, 1), lists, *arguments)  # changes nothing
        for twin, grad in zip(twins, grads):
            twin.grad = grad
        reference.step()
    weights = [join(*pair) for pair in zip(params, extra[0])] if kind == "remainder" else masters
    for weight, twin, p in zip(weights, twins, params):
        assert_close(weight, twin.detach(), "fp32_sum_order")
        assert_close(p.float(), twin.detach(), "bf16_output")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov: bool, after: bool, device: torch.device) -> None:
    params, momenta = tensors(0, device=device), tensors(9, device=device)
    copies = [p.half() for p in params]
    twins = [nn.Parameter(p.clone()) for p in params]
    decay = 0.0 if after else 0.2
    reference = torch.optim.SGD(twins, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=decay)
    for step in (1, 2, 3):
        grads = tensors(step, device=device)
        lists = [[2 * g for g in grads], params, momenta, copies]
        arguments = (0.2, 0.9, 0.0, 0.1, nesterov, step == 1, after, 0.5)
        apply(room.multi_tensor_sgd, flag(device), lists, *arguments)
        lists[0] = [g * float("nan") for g in grads]
        apply(room.multi_tensor_sgd, flag(device, 1), lists, *arguments)  # changes nothing
        for twin, grad in zip(twins, grads):
            twin.grad = grad
            if after:
                twin.data.mul_(1 - 0.1 * 0.2)
        reference.step()
    for p, copy, twin in zip(params, copies, twins):
        assert_close(p, twin.detach(), "fp32_sum_order")
        assert torch.equal(copy, p.half())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_of_one_element(shape: tuple[int, ...]) -> None:
    given, out = [torch.randn(3, 5)], [torch.zeros(3, 5)]
    flag = torch.zeros(1, dtype=torch.int32)
    room.multi_tensor_scale_tensor(2048, flag, [given, out], torch.full(shape, 0.5))
    assert torch.equal(out[0], given[0] * 0.5)


@pytest.mark.parametrize("rows", [(0,), (0, 3)])
def test_empty_tensors_are_scaled(rows: tuple[int, ...], device: torch.device) -> None:
    given = [torch.full((count, 5), math.inf, device=device) for count in rows]
    out, told = [torch.zeros_like(one) for one in given], flag(device)
    room.multi_tensor_scale(2048, told, [given, out], 0.5)
    assert told.item() == (3 in rows) and all(map(torch.equal, out, given))


@pytest.mark.parametrize(
    "lists",
    [None, torch.ones(2, 3), [[torch.ones(2)]], [torch.ones(2), torch.ones(2)], [[torch.ones(2)], [1.0]]],
    ids=["nothing", "a tensor", "one list", "tensors", "numbers"],
)
def test_other_lists_are_refused(lists: Any) -> None:
    with pytest.raises(TypeError, match="(?s)tensor_lists is .*; pass 2 or more lists of tensors"):
        room.multi_tensor_scale(2048, flag("cpu"), lists, 0.5)


@pytest.mark.parametrize(
    "name, value",
    [("bias_correction", "no"), ("beta1", "0.9"), ("beta2", None), ("epsilon", "0"), ("weight_decay", [0.1])],
)
def test_numbers_of_adam_are_checked(name: str, value: Any) -> None:
    options: dict[str, Any] = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "epsilon": 1e-8,
        "step": 1,
        "mode": 1,
        "bias_correction": 1,
        "weight_decay": 0.0,
        name: value,
    }
    lists = [[torch.ones(2)] for _ in range(4)]
    with pytest.raises(TypeError, match=f"{name} is "):
        room.multi_tensor_adam(2048, flag("cpu"), lists, **options)
