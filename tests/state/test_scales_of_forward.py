"""Every backward reads the scales of its forward: whatever runs in between, compiled, recomputed or both."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as cp
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.functional.recomputation import RUNNING
from narrowcast.upstream.private import UpstreamError

RECIPE = nc.recipe.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
Run = Callable[..., Any]
Step = Callable[[Any, Tensor, Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nc.Linear(32, 48, device="cpu"), nc.Linear(48, 32, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """``wrap``: what runs each block in place of a call."""

    def __init__(self, wrap: Callable[[Run], Run] = lambda block: block, how: str = "set_recipe") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.run = [wrap(block) for block in self.blocks]
        if how == "set_recipe":
            nc.set_recipe(self, RECIPE)
        else:
            for module in self.modules():
                if isinstance(module, nc.Linear):
                    module.recipe = RECIPE

    def forward(self, x: Tensor) -> Tensor:
        for run in self.run:
            x = run(x)
        return x


def draw(seed: int, size: float = 1.0) -> Tensor:
    return (torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)) * size).requires_grad_()


def one_forward(model: Run, x: Tensor, y: Tensor) -> None:
    model(x).square().mean().backward()


def two_forwards(model: Run, x: Tensor, y: Tensor) -> None:
    """DPO, contrastive losses."""
    (model(x).square().mean() + 0.5 * model(y).square().mean()).backward()


def no_grad_between(model: Run, x: Tensor, y: Tensor) -> None:
    loss = model(x).square().mean()
    with torch.no_grad():
        model(y)
    loss.backward()


def pipelined(model: Run, x: Tensor, y: Tensor) -> None:
    losses = [model(x).square().mean(), 0.5 * model(y).square().mean()]
    losses[0].backward()
    losses.append(2 * model(x.detach() * 7).square().mean())
    losses[1].backward()
    losses[2].backward()


def again(model: Run, x: Tensor, y: Tensor) -> None:
    """The backward of one graph runs twice, another forward between."""
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    model(y).square().mean().backward()
    loss.backward()


def train(model: nn.Module, step: Step, run: Run | None = None) -> list[Tensor]:
    """Gradients of every step, and the state of delayed scaling after it."""
    results: list[Any] = []
    for index in range(3):
        x, y = draw(2 * index, 1 + 3 * index), draw(2 * index + 1, 9.0 / (1 + index))
        step(model if run is None else run, x, y)
        results += [x.grad, *(p.grad for p in model.parameters())]
        if y.grad is not None:
            results.append(y.grad)
        results += [b.clone() for key, b in model.state_dict().items() if "scale" in key or "amax" in key]
        model.zero_grad()
    return results


def assert_same(ours: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(ours) == len(wanted)
    for a, b in zip(ours, wanted):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def compiled(run: Run) -> Run:
    return torch.compile(run, fullgraph=True, backend="aot_eager")


def recomputed(reentrant: bool = False, compiles: bool = True) -> Callable[[Run], Run]:
    def wrap(block: Run) -> Run:
        run = compiled(block) if compiles else block
        return lambda x: cp.checkpoint(run, x, use_reentrant=reentrant)

    return wrap


def both_ways(function: Any) -> Any:
    return pytest.mark.parametrize("how", ["set_recipe", "own"])(function)


@pytest.mark.covering
@both_ways
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("step", [one_forward, two_forwards, no_grad_between])
def test_compiled_inside_an_eager_checkpoint(step: Step, reentrant: bool, how: str) -> None:
    assert_same(train(Model(recomputed(reentrant), how), step), train(Model(how=how), step))


@both_ways
@pytest.mark.parametrize("step", [pipelined, again])
def test_compiled_inside_a_checkpoint_whose_backward_comes_late_or_twice(step: Step, how: str) -> None:
    assert_same(train(Model(recomputed(), how), step), train(Model(how=how), step))


def test_a_whole_compiled_model_inside_a_checkpoint() -> None:
    model = Model()
    run = compiled(model)
    assert_same(
        train(model, two_forwards, lambda x: cp.checkpoint(run, x, use_reentrant=False)),
        train(Model(), two_forwards),
    )


def test_compiled_blocks_inside_nested_checkpoints() -> None:
    model = Model(recomputed())
    assert_same(
        train(model, two_forwards, lambda x: cp.checkpoint(model, x, use_reentrant=False)),
        train(Model(), two_forwards),
    )


def test_compiled_around_checkpoints() -> None:
    """What the partitioner repeats in the backward collects no amax a second time."""
    model = Model(recomputed(compiles=False))
    assert_same(train(model, two_forwards, compiled(model)), train(Model(), two_forwards))


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [True, False], ids=["checkpoints inside", "checkpoints outside"])
def test_a_graph_and_checkpoints_on_a_gpu(inside: bool) -> None:
    """The first forward is the larger one: what a backward repeats of it would raise the amaxes of the last."""

    def on_gpu(run: Run) -> Run:
        return lambda x: run(x.to("cuda", torch.bfloat16)).float().cpu()

    def smaller(run: Run, x: Tensor, y: Tensor) -> None:
        two_forwards(run, *((x, y) if x.abs().max() > y.abs().max() else (y, x)))

    def graph(run: Run) -> Run:
        return torch.compile(run, fullgraph=True)

    def checkpoint(run: Run) -> Run:
        return lambda x: cp.checkpoint(run, x, use_reentrant=False)

    torch.compiler.reset()
    ours, plain = Model(checkpoint if inside else lambda block: checkpoint(graph(block))), Model()
    results = []
    for model, run in ((ours, graph(ours) if inside else ours), (plain, plain)):
        model.to("cuda", torch.bfloat16)
        results.append(train(model, smaller, on_gpu(run)))
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results):
        assert (a - b).float().norm() <= 0.03 * b.float().norm()


@pytest.mark.parametrize("step", [one_forward, two_forwards])
def test_an_autocast_inside_the_compiled_block(step: Step) -> None:
    def wrap(block: Run) -> Run:
        def inside(x: Tensor) -> Tensor:
            with nc.autocast(recipe=RECIPE):
                return block(x)

        return inside

    def model(around: Callable[[Run], Run]) -> Model:
        result = Model(lambda block: around(wrap(block)))
        for module in result.modules():
            if isinstance(module, nc.Linear):
                module.recipe = None
        return result

    ours = train(model(recomputed()), step)
    assert_same(ours, train(model(compiled), step))


class Mixed(nn.Module):
    """A block of which only a part is compiled, and whose eager layer runs twice."""

    def __init__(self, checkpoints: bool, reentrant: bool = False, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nc.Linear(32, 32, device="cpu"), nc.LayerNormMLP(32, 48, device="cpu")
        self.checkpoints, self.reentrant = checkpoints, reentrant
        down = compiled(self.down) if checkpoints and not whole else self.down
        self.run = [lambda x: x + down(torch.relu(self.up(torch.relu(self.up(x)))))]
        if whole:
            self.run = [compiled(self.run[0])]

    def forward(self, x: Tensor) -> Tensor:
        return (
            cp.checkpoint(self.run[0], x, use_reentrant=self.reentrant)
            if self.checkpoints
            else self.run[0](x)
        )


@pytest.mark.parametrize("whole", [False, True], ids=["in part", "whole"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_compiled_and_eager_layers_in_one_checkpoint(reentrant: bool, whole: bool) -> None:
    ours, plain = (nc.set_recipe(Mixed(on, reentrant, on and whole), RECIPE) for on in (True, False))
    assert_same(train(ours, two_forwards), train(plain, two_forwards))


def test_a_layer_that_renews_itself_runs_once_in_a_graph() -> None:
    """Eager code renews before each call, a graph could only once: it refuses."""
    model = Mixed(checkpoints=True, whole=True)
    model.up.recipe = RECIPE
    with pytest.raises(Exception, match="runs twice in one compiled function.*set_recipe"):
        train(model, one_forward)
    nc.set_recipe(model, RECIPE)
    train(model, one_forward)


class OwnCheckpoint(torch.autograd.Function):
    """As Megatron and DeepSpeed write theirs."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_checkpoint_of_the_users_own(compiles: bool) -> None:
    def wrap(block: Run) -> Run:
        run = compiled(block) if compiles else block
        return lambda x: OwnCheckpoint.apply(run, x)

    assert_same(train(Model(wrap), two_forwards), train(Model(), two_forwards))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_recomputation_whose_forward_nobody_saw_raises(compiles: bool) -> None:
    layer = nc.Linear(32, 32, device="cpu", recipe=RECIPE)
    run = compiled(layer) if compiles else layer
    y = draw(0) * 2

    def in_backward(grad: Tensor) -> None:
        with torch.enable_grad():
            run(draw(1))

    y.register_hook(in_backward)
    with pytest.raises(RuntimeError, match="which forward it repeats is not known"):
        y.sum().backward()


@pytest.mark.parametrize("recomputes", [True, False])
def test_random_operators_inside_a_compiled_checkpoint(recomputes: bool) -> None:
    """PyTorch appends random states behind the tensors that need no check of versions."""

    class Dropped(nn.Module):
        def __init__(self, recomputes: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.drop, self.recomputes = (
                nc.Linear(32, 32, device="cpu"),
                nn.Dropout(0.1),
                recomputes,
            )

        def forward(self, x: Tensor) -> Tensor:
            if self.recomputes:
                return (
                    cp.checkpoint(lambda t: self.drop(self.layer(t)), x, use_reentrant=False).square().mean()
                )
            return self.drop(self.layer(x)).square().mean()

    def gradient(recomputes: bool) -> Tensor:
        model = nc.set_recipe(Dropped(recomputes), RECIPE)
        run = compiled(model)
        for step in range(2):
            torch.manual_seed(step)
            (run(draw(step)) + run(draw(step + 5))).backward()
        return model.layer.weight.grad  # type: ignore[union-attr,return-value]

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_reentrant_checkpoint_without_gradients_collects_nothing(compiles: bool) -> None:
    """``needs_input_grad`` is True there."""
    layer = nc.Linear(32, 32, device="cpu", recipe=RECIPE)
    run = compiled(layer) if compiles else layer
    with torch.no_grad():
        cp.checkpoint(run, draw(0), use_reentrant=True)
    assert not layer.state_dict()["amax_fwd"].any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_a_layer_in_evaluation_reads_the_scales_of_its_forward(reentrant: bool) -> None:
    """A frozen block has gradients for its input; a forward in training renews the scales before its backward."""

    def gradients(recomputes: bool) -> list[Tensor]:
        layer = make_layer(seed=3)
        layer(draw(0, 0.1)).square().sum().backward()
        layer.eval()
        x = draw(1)
        y = cp.checkpoint(layer, x, use_reentrant=reentrant) if recomputes else layer(x)
        with torch.no_grad():
            layer.train()(draw(2))
            layer.eval()
        layer.weight.grad = None
        y.square().sum().backward()
        return [y.detach(), x.grad, layer.weight.grad]  # type: ignore[list-item]

    def make_layer(seed: int) -> nc.Linear:
        torch.manual_seed(seed)
        return nc.Linear(
            32, 32, bias=False, device="cpu", recipe=nc.recipe.DelayedScaling(amax_history_len=1)
        )

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False)))


def test_a_compiled_layer_in_evaluation_in_a_reentrant_checkpoint_raises() -> None:
    """Its graph runs without gradients first and keeps no scales; the error says what does."""
    model = Model()
    one_forward(model, draw(0), draw(1))
    run = compiled(model.blocks[0].eval())
    cp.checkpoint(run, draw(2), use_reentrant=False).sum().backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        cp.checkpoint(run, draw(2), use_reentrant=True).sum().backward()


def test_a_backward_may_evaluate_what_no_forward_has_run() -> None:
    layer = nc.Linear(32, 32, device="cpu", recipe=RECIPE).eval()

    class Evaluates(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            with torch.enable_grad():
                return layer(dy).detach()

    x = draw(0)
    Evaluates.apply(x).sum().backward()
    assert torch.equal(x.grad, layer(torch.ones_like(x)))  # type: ignore[arg-type]


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_parts_train_after_the_model_was_called(compiles: bool) -> None:
    model, plain = Model(), Model(how="own")
    for each in (model, plain):
        each(draw(100)).square().mean().backward()
        each.zero_grad()
    parts = [compiled(block) if compiles else block for block in model.blocks]

    def called_in_parts(x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)
        return x

    assert_same(train(model, one_forward, called_in_parts), train(plain, one_forward))


def test_parts_then_the_model_then_parts_and_a_forward_that_raises() -> None:
    model, plain, count = Model(), Model(how="own"), iter(range(100))

    def alternating(x: Tensor) -> Tensor:
        if next(count) % 2:
            return model(x)  # type: ignore[no-any-return]
        with contextlib.suppress(ValueError, RuntimeError):
            model(torch.zeros(3, 5))
        return model.blocks[1](model.blocks[0](x))  # type: ignore[no-any-return]

    assert_same(train(model, one_forward, alternating), train(plain, one_forward))


INTERRUPTS: list[bool] = []


@torch.library.custom_op("narrowcast_tests::may_be_interrupted", mutates_args=())
def may_be_interrupted(x: Tensor) -> Tensor:
    if INTERRUPTS and INTERRUPTS.pop():
        raise KeyboardInterrupt
    return x.clone()


may_be_interrupted.register_fake(torch.empty_like)
may_be_interrupted.register_autograd(lambda ctx, grad: grad)


class Interrupted(Model):
    """A model that Ctrl-C may stop between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run[1](may_be_interrupted(self.run[0](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiles", ["nothing", "parts", "model"])
def test_parts_renew_after_an_interrupt_inside_the_model(compiles: str) -> None:
    """PyTorch runs no hook for an exception that is none of ``Exception``; the traceback keeps the frames."""
    model = Interrupted(compiled if compiles == "parts" else lambda run: run)
    run = compiled(model) if compiles == "model" else model
    INTERRUPTS.append(True)
    with pytest.raises(KeyboardInterrupt) as raised:
        run(draw(0))
    largest = None
    for seed in (1, 2, 3):
        x = draw(seed, seed)
        model.run[1](model.run[0](x)).square().mean().backward()
        if largest is not None:
            torch.testing.assert_close(model.blocks[0].up.scale_fwd[0], 448 / largest)
        largest = x.detach().abs().max()
    run(draw(4)).sum().backward()
    torch.testing.assert_close(model.blocks[0].up.scale_fwd[0], 448 / largest)
    assert raised.tb is not None and not RUNNING.runs(model._renews_as)


def test_no_forward_that_ended_keeps_its_tensors() -> None:
    model, x = Model(), draw(0)
    model(x)
    assert not RUNNING._frames
    with pytest.raises(Exception, match="last dim"):
        model(torch.zeros(3, 5))
    assert not RUNNING._frames


class Local:
    """A variable of a function."""


def test_an_interrupt_inside_the_model_keeps_no_variables_of_its_callers() -> None:
    """Among them is what a checkpoint of PyTorch before 2.15 leaves on: its hooks would reach into the next step."""
    model = Model()
    one_forward(model, draw(0), draw(1))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def interrupted(kept: list[weakref.ref[Local]]) -> None:
        local = Local()
        kept.append(weakref.ref(local))
        model(draw(2))

    hook, kept = model.blocks[1].register_forward_pre_hook(interrupt), []
    with contextlib.suppress(KeyboardInterrupt):
        interrupted(kept)
    assert kept[0]() is None
    assert not RUNNING.runs(model._renews_as)
    hook.remove()
    one_forward(model, draw(0), draw(1))


# -- another PyTorch ---------------------------------------------------------------------------------------------------


class Moved(torch.autograd.graph.saved_tensors_hooks):
    """A hook of which nobody knows that it is a checkpoint's."""

    def __init__(self, hook: Any) -> None:
        pack, unpack = hook.pack_hook, hook.unpack_hook
        super().__init__(lambda x: pack(x), lambda x: unpack(x))


@contextlib.contextmanager
def hooks_moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_checkpoint_hook", "_recomputation_hook"):
        original = getattr(cp, name)
        monkeypatch.setattr(cp, name, lambda *args, original=original: Moved(original(*args)))
    yield


@pytest.mark.parametrize("step", [one_forward, two_forwards])
def test_hooks_of_a_checkpoint_that_are_not_as_expected_raise(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(recomputed(compiles=False))
    with (
        hooks_moved(monkeypatch),
        pytest.raises(UpstreamError, match=r"_checkpoint_hook.*use_reentrant=True"),
    ):
        train(model, step)
    monkeypatch.undo()
    assert_same(train(Model(recomputed(compiles=False)), step), train(Model(), step))
