"""What the operators on the state of delayed scaling do: renew many layers at once, read scales, calibrate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor

import narrowcast as nc
from narrowcast import functional, reference
from narrowcast.quantizers import DelayedFloat8Quantizer

State = tuple[list[Tensor], list[Tensor], list[Tensor]]


def states(length: int, widths: list[int]) -> State:
    """Scales, histories and amaxes of layers of different widths, with unused, infinite, NaN and subnormal amaxes."""
    scales, histories, amaxes = [], [], []
    for index, n in enumerate(widths):
        history, amax = torch.rand(length, n), torch.rand(n)
        history[0] = 0.0
        amax[index % n] = (0.0, math.nan, math.inf, 1e-40, 0.5)[index % 5]
        history[-1, (index + 1) % n] = (math.nan, math.inf, 0.0)[index % 3] if length > 1 else 0.0
        scales.append(torch.rand(n))
        histories.append(history)
        amaxes.append(amax)
    return scales, histories, amaxes


def assert_renews(length: int, widths: list[int], algorithm: str, device: torch.device) -> None:
    """Two steps of the operator against the reference, layer by layer."""
    scales, histories, amaxes = states(length, widths)
    here = [[tensor.to(device, copy=True) for tensor in tensors] for tensors in (scales, histories, amaxes)]
    for _ in range(2):
        rules = [448.0] * 2 * len(widths), [1] * len(widths), [algorithm] * len(widths)
        functional.renew_delayed_scaling(*here, *rules)
        for index, (scale, history, amax) in enumerate(zip(scales, histories, amaxes, strict=True)):
            history[0] = amax.nan_to_num(nan=0.0, posinf=0.0)  # neither tells anything
            scales[index], histories[index] = reference.delayed.update(
                scale, history, fp8_max=448.0, margin=1, algo=algorithm
            )
            assert_bitwise(here[0][index], scales[index], f"scale {index} of {widths}")
            assert_bitwise(here[1][index], histories[index], f"history {index} of {widths}")
            assert not here[2][index].any(), "the next step collects from zero"
        for amax, collected in zip(amaxes, here[2], strict=True):
            amax.copy_(torch.rand(amax.shape))
            collected.copy_(amax)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 65, 600])
def test_renews_layers_of_any_width(length: int, algorithm: str, device: torch.device) -> None:
    assert_renews(length, [3, 2, 9, 1, 3, 2, 2, *[4] * 7], algorithm, device)


@pytest.mark.gpu
def test_renews_many_layers(device: torch.device) -> None:
    assert_renews(1024, [3, 2] * 200, "max", device)


@pytest.mark.parametrize("width", [1, 3])
def test_writes_strided_state_in_place(width: int, device: torch.device) -> None:
    """Histories may be the first rows, or every second column, of something larger."""
    whole = torch.rand(8, 2 * width, device=device)
    rest = whole[:, 1::2].clone(), whole[5:].clone()
    scale, amax = torch.ones(width, device=device), torch.full((width,), 2.0, device=device)
    functional.renew_delayed_scaling([scale], [whole[:5, ::2]], [amax], [448.0] * 2, [0], ["most_recent"])
    assert (scale == 224.0).all() and not whole[0, ::2].any() and (whole[4, ::2] == 2.0).all()
    assert torch.equal(whole[:, 1::2], rest[0]) and torch.equal(whole[5:], rest[1])


def test_no_layers_are_no_work() -> None:
    functional.renew_delayed_scaling([], [], [], [], [], [])


@pytest.mark.parametrize("layers", [2, 12])
def test_renews_each_state_by_its_own_rule(layers: int, device: torch.device) -> None:
    """Histories of several lengths, formats and margins, in one call."""
    rules = [((448.0, 57344.0), 0, "max"), ((57344.0, 57344.0), 1, "most_recent")]
    few, many = states(4, [3, 2] * layers), states(7, [3, 2] * layers)
    given: State = tuple([*a, *b] for a, b in zip(few, many, strict=True))  # type: ignore[assignment]
    asked = [rules[at % 2] for at in range(4 * layers)]
    here = [[tensor.to(device, copy=True) for tensor in tensors] for tensors in given]
    pairs, *others = (list(column) for column in zip(*asked, strict=True))
    functional.renew_delayed_scaling(*here, list(itertools.chain(*pairs)), *others)
    for at, (scale, history, amax) in enumerate(zip(*given, strict=True)):
        history[0] = amax.nan_to_num(nan=0.0, posinf=0.0)
        pair, margin, algorithm = asked[at]
        fp8_max = reference.delayed.of_halves(scale, *pair)
        expected = reference.delayed.update(scale, history, fp8_max=fp8_max, margin=margin, algo=algorithm)
        assert_bitwise(here[0][at], expected[0], f"scale {at}")
        assert_bitwise(here[1][at], expected[1], f"history {at}")
        assert not here[2][at].any()


@pytest.mark.gpu
def test_captures_into_a_graph(device: torch.device) -> None:
    scale, history = torch.ones(3, device=device), torch.zeros(16, 3, device=device)
    amax = torch.zeros(3, device=device)
    functional.renew_delayed_scaling([scale], [history], [amax], [448.0] * 2, [0], ["max"])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        functional.renew_delayed_scaling([scale], [history], [amax], [448.0] * 2, [0], ["max"])
    amax.copy_(torch.tensor([2.0, 0.0, 4.0]))
    graph.replay()
    assert scale.tolist() == [224.0, 1.0, 112.0] and not amax.any()
    assert history[-1].tolist() == [2.0, 0.0, 4.0] and not history[0].any()


def test_calibrating_overwrites_the_amax_of_inputs(device: torch.device) -> None:
    x, amax = torch.tensor([1.0, math.nan, -3.0], device=device), torch.full((4,), 9.0, device=device)
    functional.calibrate_(x, None, amax)
    assert amax.tolist() == [3.0, 9.0, 9.0, 9.0]
    functional.calibrate_(x.view(3, 1), torch.tensor([2, 0, 1], device=device), amax)
    assert amax.tolist() == [1.0, 0.0, 3.0, 9.0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_collects_what_an_eager_one_does(backend: str) -> None:
    """The amax collected in forward and backward, and scales that a later step renews."""
    fprop, dgrad = (DelayedFloat8Quantizer(nc.DType.kFloat8E4M3, slot, -448.0) for slot in (0, 1))

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale, amax):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(scale)
            ctx.amax = amax
            codes, _, scale_inv = functional.quantize(x, fprop, None, scale, amax)
            return functional.dequantize([codes, scale_inv], fprop, False, x.dtype, x.shape)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (scale,) = ctx.saved_tensors
            codes, _, scale_inv = functional.quantize(grad, dgrad, None, scale, ctx.amax)
            return functional.dequantize([codes, scale_inv], dgrad, False, grad.dtype, grad.shape), None, None

    def step(x: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
        return Scaled.apply(x, scale, amax)

    def run(step):  # type: ignore[no-untyped-def]
        scale, history, amax = torch.zeros(2), torch.zeros(4, 2), torch.zeros(2)
        results = []
        for index in range(4):
            generator = torch.Generator().manual_seed(index)
            x = (torch.randn(16, 32, generator=generator) * (1 + 3 * index)).requires_grad_()
            y = step(x, scale, amax)
            collected = amax.clone()
            (y * y).sum().backward()
            results += [y.detach(), x.grad, collected, amax.clone(), scale.clone(), history.clone()]
            functional.renew_delayed_scaling([scale], [history], [amax], [448.0] * 2, [0], ["max"])
        return results

    torch._dynamo.reset()
    compiled = run(torch.compile(step, fullgraph=True, backend=backend))
    for index, (actual, expected) in enumerate(zip(compiled, run(step), strict=True)):
        assert_bitwise(actual, expected, f"result {index % 6} of step {index // 6}")
