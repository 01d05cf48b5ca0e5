"""Replayed lists of operations: the bits of those that run themselves, and what a recording must not outlive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modules import assert_equal
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast import ops
from narrowcast.functional import replay


def with_channel(**place: Any) -> list[Any]:
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput(in_place=True)
    begin.set_extra_output_channel(0, "skip", output_to_caller=False)
    end.set_extra_input_channel(0, "skip")
    return [
        begin,
        ops.LayerNorm(64, **place),
        ops.Linear(64, 96, **place),
        ops.SiLU(),
        ops.BasicLinear(96, 64, **place),
        end,
    ]


LISTS: dict[str, Callable[..., list[Any]]] = {
    "linear": lambda **kw: [ops.Linear(64, 48, **kw)],
    "norm, linear": lambda **kw: [ops.RMSNorm(64, **kw), ops.Linear(64, 48, bias=False, **kw)],
    "block": lambda **kw: [
        ops.LayerNorm(64, **kw),
        ops.Linear(64, 96, **kw),
        ops.SwiGLU(),
        ops.Linear(48, 64, **kw),
    ],
    "residual": lambda **kw: [
        ops.MakeExtraOutput(),
        ops.RMSNorm(64, **kw),
        ops.Linear(64, 64, **kw),
        ops.AddExtraInput(in_place=True),
    ],
    "channel": with_channel,
    "scaled": lambda **kw: [
        ops.MakeExtraOutput(in_place=True),
        ops.BasicLinear(64, 64, **kw),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(),
        ops.Reshape((-1, 64)),
    ],
    "others": lambda **kw: [
        ops.L2Normalization(),
        ops.Identity(),
        ops.Bias(64, **kw),
        ops.GELU(cache_quantized_input=True),
        ops.Linear(64, 64, **kw),
        ops.SwiGLU(glu_interleave_size=16),
    ],
}
RECIPES = {"none": None, **{name: recipe for name, recipe in QUANTIZED.items() if name != "custom"}}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lists on a CPU are recorded, too; nothing that is known stays."""
    monkeypatch.setattr(replay, "ON_CPU", True)
    replay._known.clear()
    yield
    replay._known.clear()


def built(kind: str, recipe: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = LISTS[kind](device=DEVICE, **{"dtype": torch.bfloat16, **options})
    return nc.set_recipe(ops.Sequential(*made), recipe)


def extras(module: nn.Module, x: Tensor) -> list[Tensor]:
    wanted = sum(group.wiring.from_caller for group in module.groups())  # type: ignore[operator,union-attr]
    return [x.detach() + at for at in range(1, 1 + wanted)]


def train(
    module: nn.Module, steps: int = 5, lead: tuple[int, ...] = (4, 8), grad: bool = True
) -> list[Tensor]:
    """Outputs and gradients of some steps, and the buffers after them."""
    results = []
    for at in range(steps):
        torch.manual_seed(at)
        x = torch.randn(*lead, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=grad)
        more = [extra.requires_grad_(grad) for extra in extras(module, x)]
        out = module(x, *more)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [torch.randn_like(one) for one in outs])
        results += [one.detach() for one in outs]
        results += [one.grad.clone() for one in (x, *more, *module.parameters()) if one.grad is not None]
        module.zero_grad()
    return results + [buffer.clone() for buffer in module.buffers()]


def recordings() -> list[str]:
    """What was recorded."""
    return sorted(
        key[0].__name__
        for key, value in replay._known.items()
        if value is not replay._SEEN and value is not key[0]
    )


def unrecorded(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    with monkeypatch.context() as off:
        off.setattr(replay, "ENABLED", False)
        found = run()
    assert not replay._known
    return found


@pytest.mark.covering
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("lead", [(32,), (4, 8)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LISTS)
def test_steps_are_equal(
    kind: str, recipe: str, lead: tuple[int, ...], grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[Tensor]:
        return train(built(kind, RECIPES[recipe]), lead=lead, grad=grad)

    expected = unrecorded(monkeypatch, run)
    assert_equal(run(), expected)
    assert {"_forward", "_backward"} <= set(recordings())


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_without_gradients(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        module = built("block", RECIPES[recipe]).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            return [module(torch.randn(5, 64, dtype=torch.bfloat16, device=DEVICE)) for _ in range(4)]

    expected = unrecorded(monkeypatch, run)
    assert_equal(run(), expected)
    assert "_forward" in recordings()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_equal_lists_share_a_recording_and_keep_their_own_state(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[Tensor]:
        first, second = (built("block", QUANTIZED[recipe]) for _ in range(2))
        with torch.no_grad():
            second[1].weight.mul_(3)  # type: ignore[operator,union-attr]
        return [x for _ in range(4) for module in (first, second) for x in train(module, 1)]

    expected = unrecorded(monkeypatch, run)
    assert_equal(run(), expected)
    assert recordings().count("_forward") == 1 and recordings().count("_backward") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module[0], "settings", ops.LayerNorm(64, eps=0.5, device=DEVICE).settings),
        lambda module: setattr(module, "2", ops.GEGLU()),
        lambda module: module[1].basic_ops[1].bias.requires_grad_(False),
        lambda module: module[1].weight.requires_grad_(False),
        lambda module: setattr(module[1], "weight", nn.Parameter(2 * module[1].weight.detach())),
        lambda module: module.to(torch.float32).to(torch.bfloat16),
        lambda module: nc.set_recipe(module, QUANTIZED["mxfp8"]),
        lambda module: module.__setstate__(module.__getstate__()),
    ],
    ids=["settings", "operation", "bias", "frozen", "weight", "moved", "recipe", "pickled"],
)
def test_what_changes_between_two_calls_counts(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        module = built("block", QUANTIZED["current"])
        before = train(module)
        change(module)
        return before + train(module)

    expected = unrecorded(monkeypatch, run)
    assert_equal(run(), expected)


class Counted(ops.RMSNorm):
    """A user's operation, which is the library's but for what it counts."""

    calls = 0

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return super().op_forward_compute(input_, **kwargs)

    def op_forward_save_ctx(self, *args: Any, **kwargs: Any) -> None:
        super().op_forward_save_ctx(*args, **kwargs)


def test_a_users_operation_runs_every_time() -> None:
    place: Any = {"device": DEVICE, "dtype": torch.bfloat16}
    module = ops.Sequential(Counted(64, **place), ops.Linear(64, 64, **place))
    before = Counted.calls
    train(nc.set_recipe(module, QUANTIZED["delayed"]))
    assert Counted.calls == before + 5 and not {"_forward", "_backward"} & set(recordings())


class Renamed(nc.ops.fused.ForwardLinearBiasActivation):
    """A user's fused operation."""

    calls = 0

    def fuser_forward_compute(self, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return super().fuser_forward_compute(*args, **kwargs)

    def fuser_forward_save_ctx(self, *args: Any, **kwargs: Any) -> None:
        super().fuser_forward_save_ctx(*args, **kwargs)


def test_a_users_fusion_runs_every_time() -> None:
    def fusion(found: list[Any], *, recipe: Any) -> list[Any]:
        return [Renamed(found)]

    module = built("linear", QUANTIZED["current"])
    train(module)
    ops.register_forward_fusion(fusion, prepend=True)
    try:
        train(module)
        assert Renamed.calls == 5
    finally:
        ops.unregister_fusion(fusion)
    train(module)
    assert Renamed.calls == 5


def test_dropout_drops_others_each_time() -> None:
    module = ops.Sequential(ops.Dropout(0.5), ops.GELU())
    x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    kept = []
    for _ in range(5):
        module(x).sum().backward()
        kept.append(x.grad != 0)  # type: ignore[operator]
        x.grad = None
    assert "_backward" in recordings()
    assert not any(torch.equal(one, other) for one, other in zip(kept, kept[1:]))
    assert torch.equal(module.eval()(x), torch.nn.functional.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_a_graph_that_is_kept_runs_twice(recipe: str) -> None:
    module = built("residual", QUANTIZED[recipe])
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    leaves = [x, *module.parameters()]
    for _ in range(5):
        loss = sum(out.float().square().sum() for out in module(x, *extras(module, x)))
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grads_are_accumulated(overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        module = built("norm, linear", QUANTIZED["delayed"])
        linear: Any = module[1].basic_ops[0]  # type: ignore[union-attr]
        linear.fuse_wgrad_accumulation = True
        sums = []
        for at in range(6):
            if at % 3 == 0:  # as an optimizer makes it anew
                linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
                linear.weight.overwrite_main_grad = overwrite
            train(module, 1)
            sums.append(linear.weight.main_grad.clone())
        return sums

    expected = unrecorded(monkeypatch, run)
    assert_equal(run(), expected)
    assert "_backward" in recordings()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_reads_the_scales_of_its_forward(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[Tensor]:
        module, results = built("block", QUANTIZED["delayed"]), []
        for at in range(5):
            torch.manual_seed(at)
            x = torch.randn(32, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=use_reentrant)
            out.float().square().sum().backward()
            results += [x.grad, *[p.grad.clone() for p in module.parameters()]]  # type: ignore[union-attr]
        return results + [buffer.clone() for buffer in module.buffers()]

    expected = unrecorded(monkeypatch, run)
    assert_equal(run(), expected)


def test_the_node_tells_what_its_backward_reads() -> None:
    module = built("block", QUANTIZED["delayed"])
    for _ in range(5):
        out = module(torch.randn(32, 64, dtype=torch.bfloat16, device=DEVICE))
        args = out.grad_fn.backward_objects
        assert args.fp8 and args.backward_override is None
        assert args.amax is module[1].basic_ops[0].amax  # type: ignore[union-attr]
        out.sum().backward()


def test_a_recording_keeps_no_tensor() -> None:
    module = built("block", QUANTIZED["delayed"])
    train(module)
    seen = [weakref.ref(tensor) for tensor in (*module.parameters(), *module.buffers())]
    assert len(recordings()) >= 2
    del module
    gc.collect()
    assert not [one for one in seen if one() is not None]


def test_an_output_that_is_the_input_in_another_shape_is_a_copy() -> None:
    module, x = ops.Sequential(ops.Reshape((-1, 64))), torch.randn(4, 8, 64, requires_grad=True)
    for _ in range(4):
        given = x * 1
        out = module(given).add_(1)
        assert torch.equal(given, x) and torch.equal(out, x.reshape(-1, 64) + 1)
