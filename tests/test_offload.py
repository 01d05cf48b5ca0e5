"""Offloaded activations: the same bits, and only what is saved moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import assert_equal
from recipes import DEVICE, RECIPES
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import narrowcast as nc
from narrowcast import offload

WIDTH, ROWS, LAYERS = 64, 96, 4


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_ELEMENTS", 1)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The bytes of each copy, and whether it went to the host or came back."""
    seen: dict[str, list[Any]] = {"to_host": [], "to_device": []}

    def counted(name: str) -> Callable[[Any], None]:
        copy = getattr(offload._Moved, name)

        def run(moved: Any) -> None:
            copy(moved)
            seen[name].append(moved.on_host.nbytes)

        return run

    for name in seen:
        monkeypatch.setattr(offload._Moved, name, counted(name))
    return seen


def model(recipe: Any, layers: int = LAYERS, width: int = WIDTH, device: Any = DEVICE) -> nn.ModuleList:
    torch.manual_seed(1)
    made = nn.ModuleList(
        nn.Sequential(
            nc.LayerNormLinear(width, 2 * width, device=device),
            nn.GELU(),
            nc.Linear(2 * width, width, device=device),
        )
        for _ in range(layers)
    )
    nc.set_recipe(made, recipe)
    return made


def step(
    layers: nn.ModuleList, x: Tensor, given: tuple[Any, ...] | None = None, times: int = 1
) -> list[Tensor]:
    context, sync, *_ = given or nc.get_cpu_offload_context()
    for p in layers.parameters():
        p.grad = None
    y = x
    for layer in layers:
        with context:
            y = layer(y) + y
        y = sync(y)
    for index in range(times):
        y.square().mean().backward(retain_graph=index + 1 < times)
    return [y.detach(), *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_bits(name: str, no_limit: None, moves: dict[str, list[Any]]) -> None:
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    expected = [step(layers, x) for layers in [model(RECIPES[name])] for _ in range(3)]
    layers = model(RECIPES[name])
    given = nc.get_cpu_offload_context(True, LAYERS - 1, LAYERS)
    for index in range(3):
        assert_equal(step(layers, x, given), expected[index])
    assert len(moves["to_host"]) == len(moves["to_device"]) > 0, "each storage goes once, and comes back once"


def test_codes_move_and_not_bf16(no_limit: None, moves: dict[str, list[Any]]) -> None:
    """Saved for a linear layer: a byte for each element of input and weight, and two scales."""
    layer = nc.Linear(WIDTH, 32, bias=False, device=DEVICE, recipe=RECIPES["current"], dtype=torch.bfloat16)
    context, sync = nc.get_cpu_offload_context(True, 1, 2)
    with context:
        y = layer(torch.randn(ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16, requires_grad=True))
    sync(y).sum().backward()
    assert sum(moves["to_host"]) <= ROWS * WIDTH + WIDTH * 32 + 4 * 512


def test_backward_twice(no_limit: None) -> None:
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    expected = step(model(RECIPES["mxfp8"]), x, times=2)
    given = nc.get_cpu_offload_context(True, 2, LAYERS)
    assert_equal(step(model(RECIPES["mxfp8"]), x, given, times=2), expected)


def test_what_stays(no_limit: None, moves: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    x, marked = (torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True) for _ in range(2))
    weight = nn.Parameter(torch.randn(ROWS, WIDTH, device=DEVICE))
    nc.mark_not_offload(marked, None)

    def run() -> int:
        context, sync = nc.get_cpu_offload_context(True, 1, 2)
        moves["to_host"].clear()
        with context:
            y = (x * weight + marked[:5].sum()) * marked.view(ROWS, WIDTH)
        sync(y).sum().backward()
        return sum(moves["to_host"])

    product = 4 * ROWS * WIDTH
    assert (
        run() == 2 * product
    )  # x, and the sum that marked is multiplied with; neither marked nor the weight
    monkeypatch.setattr(offload, "LEAST_ELEMENTS", ROWS * WIDTH + 1)
    assert run() == 0


def test_views_of_one_storage_move_once(no_limit: None, moves: dict[str, list[Any]]) -> None:
    base = torch.randn(3, 8, 16, device=DEVICE, requires_grad=True)
    context, sync = nc.get_cpu_offload_context(True, 1, 2)
    with context:
        q, k, v = (2 * base).unbind(0)
        y = q * k.roll(0) + torch.sigmoid(v.t()).t() * q + k * v
    sync(y).sum().backward()
    expected = torch.autograd.grad(
        (lambda q, k, v: q * k + torch.sigmoid(v) * q + k * v)(*(2 * base).unbind(0)).sum(), base
    )
    torch.testing.assert_close(base.grad, expected[0])
    # the base; what roll made; what sigmoid made
    assert sorted(moves["to_host"]) == [512, 512, 3 * 512]


def test_memory_is_let_go(no_limit: None) -> None:
    import weakref

    kept: list[Any] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            saved = x.exp()
            kept.append(weakref.ref(saved.untyped_storage()))
            ctx.save_for_backward(saved)
            kept.append(offload.StorageWeakRef(saved.untyped_storage()))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    context, sync = nc.get_cpu_offload_context(True, 1, 2)
    x = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    with context:
        y = Keeps.apply(x)
    y = sync(y)
    assert not kept[1].expired(), "it is leaving"
    with context:
        y = y.sin()
    y = sync(y)
    assert kept[1].expired()
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, (2 * x).cos() * x.exp())


def test_a_write_before_the_copy_is_noticed(no_limit: None) -> None:
    context, sync = nc.get_cpu_offload_context(True, 1, 2)
    x = torch.randn(8, 8, device=DEVICE, requires_grad=True)
    with context:
        y = x * 2
        z = y.square()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified in place before its layer ended"):
        sync(z)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("saves_output", [True, False])
def test_a_write_before_the_backward_is_noticed(
    stays: bool, saves_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without hooks: of what stays on the device, and of the layer whose device memory is not free yet."""
    monkeypatch.setattr(nc.offload, "LEAST_ELEMENTS", 10**9 if stays else 1)
    context, sync = nc.get_cpu_offload_context(True, 1, 2)
    x = torch.randn(8, 7, device=DEVICE, requires_grad=True)
    with context:
        y = x * 2
        z = y.exp() if saves_output else y.square()
    z = sync(z)
    with torch.no_grad():
        (z if saves_output else y).add_(1)
    with pytest.raises(RuntimeError, match="modified in place before its backward; run the backward"):
        z.sum().backward()


@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["none", "current"])
def test_a_step_before_the_backward_is_noticed(recipe: Any) -> None:
    """A parameter stays where it is, and a retained graph would multiply by what it is after the step."""
    layers = model(recipe, 2)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    context, sync = nc.get_cpu_offload_context(True, 1, 2)
    x = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    with context:
        y = layers[0](x)
    loss = layers[1](sync(y)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified in place before its backward"):
        torch.autograd.grad(y, x, torch.ones_like(y))


def test_manual(no_limit: None, moves: dict[str, list[Any]]) -> None:
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    expected = step(model(RECIPES["current"], 2), x)
    context, sync, controller = nc.get_cpu_offload_context(True, model_layers=2, manual_synchronization=True)
    assert isinstance(controller, nc.ManualOffloadSynchronizer)
    layers, y = model(RECIPES["current"], 2), x
    for index, layer in enumerate(layers):
        with context:
            y = layer(y) + y
        y = sync(y)
        assert not moves["to_host"] or index
        if index == 0:
            controller.start_offload_layer(0)
            assert moves["to_host"]
            controller.release_activation_forward_gpu_memory(0)
    controller.start_reload_layer(0)
    assert len(moves["to_device"]) == len(moves["to_host"])
    y.square().mean().backward()
    assert_equal([y.detach(), *(p.grad for p in layers.parameters())], expected)
    with pytest.raises(ValueError, match="layer_id is 2; the last forward had layers 0 to 1"):
        controller.start_reload_layer(2)


def test_a_retained_graph_of_manual_and_no_grad(no_limit: None) -> None:
    given = nc.get_cpu_offload_context(True, 1, 2)
    with torch.no_grad():
        context, sync = given
        for _ in range(2):
            with context:
                y = torch.ones(4).exp()
            sync(y)
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    assert_equal(step(model(None, 2), x, given), step(model(None, 2), x))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"offload_activations": False}, "nothing to offload"),
        ({"num_layers": 4}, "num_layers is 4 of model_layers=4; use 1 to 3"),
        ({"num_layers": 2, "model_layers": 1}, "^model_layers is 1; use the number of layers in a forward"),
        ({"offload_stream": object()}, "manual_synchronization"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.get_cpu_offload_context(True, **{"num_layers": 1, "model_layers": 4, **options})


def test_disabled_and_deprecated_and_entered_twice() -> None:
    for manual, count in ((False, 2), (True, 3)):
        made = nc.get_cpu_offload_context(manual_synchronization=manual, num_layers=9)
        assert len(made) == count
        x = torch.ones(2)
        with made[0]:
            assert made[1](x) is x
        if manual:
            made[2].start_offload_layer(0)
    with pytest.warns(DeprecationWarning, match="offload_weights"):
        context, _ = nc.get_cpu_offload_context(True, 1, 2, offload_weights=True)
    with context:
        pass
    with pytest.raises(RuntimeError, match="entered again before the sync function"), context:
        pass


def test_a_failed_layer_leaves_nothing_behind(no_limit: None) -> None:
    given = nc.get_cpu_offload_context(True, 1, 2)
    with contextlib.suppress(ZeroDivisionError), given[0]:
        raise ZeroDivisionError
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    assert_equal(step(model(None, 2), x, given), step(model(None, 2), x))


def test_compiling_it_is_refused() -> None:
    context, _ = nc.get_cpu_offload_context(True, 1, 2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        with context:
            return x.sin()

    # before 2.15 PyTorch refuses the context by its class before our words are read
    ours = TorchVersion(torch.__version__) >= "2.15"
    with pytest.raises(Exception, match="compile the layers inside" if ours else "_Offload|context manager"):
        run(torch.ones(3, requires_grad=True))


def test_around_a_function_compiled_in_parts(no_limit: None, moves: dict[str, list[Any]]) -> None:
    """Without ``fullgraph`` the graph ends at the context, and what is in it moves as in eager code."""
    results = []
    for compiled in (False, True):
        context, sync = nc.get_cpu_offload_context(True, 1, 2)

        def run(x: Tensor, context: Any = context, sync: Any = sync) -> Tensor:
            for _ in range(2):
                with context:
                    y = x.sin().exp()
                x = sync(y)
            return x

        x = torch.linspace(-1, 1, 32).requires_grad_(True)
        out = (torch.compile(run, backend="aot_eager") if compiled else run)(x)
        gradients = torch.autograd.grad(out.sum(), x)
        results.append((out, *gradients, {name: list(each) for name, each in moves.items()}))
        moves["to_host"].clear()
        moves["to_device"].clear()
    eager, parts = results
    assert torch.equal(eager[0], parts[0]) and torch.equal(eager[1], parts[1])
    assert eager[2] == parts[2] and eager[2]["to_host"]


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("name", RECIPES)
def test_torchs_own_save_on_cpu(name: str, quantized: bool) -> None:
    """``torch.autograd.graph.save_on_cpu`` gives the same bits, with plain and with quantized weights."""
    recipe = RECIPES[name]
    if recipe is None and quantized:
        pytest.skip("without a recipe no weight is quantized")
    results = []
    for context in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu()):
        torch.manual_seed(0)
        with nc.quantized_model_init(quantized, recipe=recipe or RECIPES["current"]):
            layers = nn.Sequential(
                nc.Linear(WIDTH, WIDTH, device=DEVICE), nc.LayerNormMLP(WIDTH, 2 * WIDTH, device=DEVICE)
            )
        nc.set_recipe(layers, recipe)
        x = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
        with context:
            y = layers(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layers.parameters())])
    assert_equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_peak_memory_falls(name: str) -> None:
    width, rows, count = 1024, 8192, 8
    x = torch.randn(rows, width, device="cuda")
    peaks, results = [], []
    for offloaded in (0, count - 1):
        layers = model(RECIPES[name], count, width, "cuda")
        given = nc.get_cpu_offload_context(offloaded > 0, offloaded, count)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made = step(layers, x, given)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append(made)
    assert_equal(*results)
    assert peaks[-1] < 0.7 * peaks[1]
