"""Replayed stages: the bits of those that run themselves, and no replay where that would not be all of it."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from modules import assert_equal
from recipes import EMULATE, QUANTIZED
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import narrowcast as nc
from narrowcast.functional import replay, replay_of
from narrowcast.kernels import AVAILABLE

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **options: nc.Linear(64, 48, **options),
    "no bias": lambda **options: nc.Linear(64, 48, bias=False, **options),
    "layernorm_linear": lambda **options: nc.LayerNormLinear(64, 48, return_layernorm_output=True, **options),
    "layernorm_mlp": lambda **options: nc.LayerNormMLP(64, 96, activation="swiglu", **options),
    "layernorm_mlp, plain": lambda **options: nc.LayerNormMLP(
        64,
        96,
        normalization="RMSNorm",
        activation="gelu",
        bias=False,
        return_layernorm_output=True,
        **options,
    ),
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stages on a CPU are recorded, too; nothing that is known stays."""
    monkeypatch.setattr(replay, "ON_CPU", True)
    replay._known.clear()
    yield
    replay._known.clear()


def known() -> list[str]:
    """What there is for each key that was met."""
    kinds = {id(replay._SEEN): "seen"}
    return [
        "stage" if value is key[0] else kinds.get(id(value), "recording")
        for key, value in replay._known.items()
    ]


def train(
    layer: nn.Module, device: torch.device, lead: tuple[int, ...] = (32,), steps: int = 4, **options: Any
) -> list[Tensor]:
    """Outputs and gradients of some steps, and the buffers after them."""
    results = []
    for at in range(steps):
        torch.manual_seed(at)
        x = torch.randn(*lead, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        out = layer(x, **options)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [torch.randn_like(one) for one in outs])
        wanted = [x, *layer.parameters()]
        results += [one.detach() for one in outs]
        results += [one.grad.clone() for one in wanted if one.grad is not None]
        layer.zero_grad()
    return results + [buffer.clone() for buffer in layer.buffers()]


def built(make: Callable[..., nn.Module], recipe: Any, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return make(dtype=torch.bfloat16, device=device, recipe=recipe)


# -- in layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("lead", [(32,), (4, 8)])
@pytest.mark.parametrize("recipe", [name for name in QUANTIZED if name != "custom"])
@pytest.mark.parametrize("layer", LAYERS)
def test_steps_are_equal(
    layer: str, recipe: str, lead: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as off:
        off.setattr(replay, "ENABLED", False)
        expected = train(built(LAYERS[layer], QUANTIZED[recipe], device), device, lead)
        assert not replay._known
    assert_equal(train(built(LAYERS[layer], QUANTIZED[recipe], device), device, lead), expected)
    assert known() == ["recording"] * 2  # of the forward and the backward


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_graph_that_is_kept_runs_twice(kind: str, recipe: str, device: torch.device) -> None:
    layer = LAYERS[kind](device=device, recipe=QUANTIZED[recipe])
    x = torch.randn(32, 64, device=device, requires_grad=True)
    leaves = [x, *layer.parameters()]
    for _ in range(4):
        out = layer(x)
        loss = (out[0] if isinstance(out, tuple) else out).float().square().sum()
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_microbatches_keep_their_weight(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> list[Tensor]:
        layer = built(LAYERS["linear"], QUANTIZED["current"], device)
        first = train(layer, device, steps=1, is_first_microbatch=True)
        return first + train(layer, device, is_first_microbatch=False)

    with monkeypatch.context() as off:
        off.setattr(replay, "ENABLED", False)
        expected = steps()
    assert_equal(steps(), expected)
    assert known().count("recording") == 2


def test_main_grads_are_accumulated(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def sums() -> Tensor:
        layer: Any = built(accumulating_linear, QUANTIZED["current"], device)
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        for at in range(4):
            torch.manual_seed(at)
            x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
            layer(x).sum().backward()
        return layer.weight.main_grad  # type: ignore[no-any-return]

    with monkeypatch.context() as off:
        off.setattr(replay, "ENABLED", False)
        expected = sums()
    assert torch.equal(sums(), expected) and known() == ["recording", "recording"]


def accumulating_linear(**options: Any) -> nn.Module:
    return nc.Linear(64, 48, bias=False, fuse_wgrad_accumulation=True, **options)


SPLITS = ([8, 0, 3], [1, 9, 2], [12, 0, 0], [2, 2, 2])


def train_groups(layer: Any, device: torch.device) -> list[Tensor]:
    """Outputs and gradients of steps whose splits differ, on the device; weights lie apart in the last one."""
    results, weights = [], [w for name, w in layer.named_parameters() if name.startswith("weight")]
    for w in weights:
        w.main_grad = torch.zeros(w.shape, device=device)
    for at, sizes in enumerate(SPLITS):
        if at == 3:
            for w in weights:
                w.data = w.data.clone()
        torch.manual_seed(at)
        x = torch.randn(12, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
        out = layer(x, torch.tensor(sizes, device=device))
        out.backward(torch.randn_like(out))
        results += [out.detach(), x.grad, *[p.grad.clone() for p in layer.parameters() if p.grad is not None]]
        layer.zero_grad()
    return [*results, *[w.main_grad for w in weights], *[buffer.clone() for buffer in layer.buffers()]]


def grouped_layer(**options: Any) -> nn.Module:
    return nc.GroupedLinear(3, 32, 16, **options)


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_splits_that_the_host_reads_are_read_again(
    recipe: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No dispatch mode sees how they are read; a recording would repeat the groups of its own call."""
    with monkeypatch.context() as off:
        off.setattr(replay, "ENABLED", False)
        expected = train_groups(built(grouped_layer, QUANTIZED[recipe], device), device)
    assert_equal(train_groups(built(grouped_layer, QUANTIZED[recipe], device), device), expected)
    if device.type == "cpu" or recipe == "mxfp8":  # no grouped GEMM of its own
        kinds = [kind for kind, key in zip(known(), replay._known) if "linear" in key[0].__name__]
        assert kinds.count("stage") >= 2 and "recording" not in kinds


@pytest.mark.parametrize(
    "recipe, options",
    [
        ("current", {}),
        ("delayed", {"fuse_wgrad_accumulation": True, "bias": False}),
    ],
)
def test_groups_whose_splits_stay_on_the_device_are_replayed(
    recipe: str, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of a GPU; without one these are interpreted."""
    if device.type == "cpu":
        kernels = pytest.importorskip("narrowcast.kernels")
        if not AVAILABLE:
            pytest.skip("Triton is missing")
        if metadata.version("triton").startswith("3.6."):
            pytest.skip("needs an NVIDIA GPU: the interpreter of Triton 3.6 cannot loop as this kernel does")
        for room in ("quantize", "grouped_quantize", "numerics"):
            monkeypatch.setattr(
                sys.modules[f"narrowcast.functional.{room}"], "numerics_for", lambda x: kernels
            )
        gemm = sys.modules["narrowcast.functional.grouped_gemm"]
        native = gemm._multiply_native
        monkeypatch.setattr(gemm, "_multiply_each", lambda *given: native(*given[:-1], False))
        monkeypatch.setattr(sys.modules["narrowcast.layers.grouped_layer"], "host_reads", lambda x: False)

    def make(**place: Any) -> nn.Module:
        return grouped_layer(**options, **place)

    with monkeypatch.context() as off:
        off.setattr(replay, "ENABLED", False)
        expected = train_groups(built(make, QUANTIZED[recipe], device), device)
    assert_equal(train_groups(built(make, QUANTIZED[recipe], device), device), expected)
    kinds = [kind for kind, key in zip(known(), replay._known) if "linear" in key[0].__name__]
    assert kinds.count("recording") >= 2 and "stage" not in kinds


def test_threads_with_two_recipes(device: torch.device) -> None:
    inputs = [torch.randn(32, 64, dtype=torch.bfloat16, device=device) for _ in range(8)]
    layers = [built(LAYERS["linear"], QUANTIZED[name], device) for name in ("current", "delayed")]
    found: dict[Any, list[Tensor]] = {}

    def run(layer: Any) -> None:
        for x in inputs:
            out = layer(x)
            out.backward(torch.ones_like(out))
            found.setdefault(layer, []).append(out.detach())

    copies = copy.deepcopy(layers)
    threads = [threading.Thread(target=run, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for layer, alone in zip(layers, copies):
        run(alone)
        assert_equal([*found[layer], layer.weight.grad], [*found[alone], alone.weight.grad])  # type: ignore[list-item]


class Shifted(nc.Float8CurrentScalingQuantizer):
    """A user's quantizer, whose code depends on more than the tensor."""

    calls = itertools.count()

    def _encode(self, numerics: Any, x: Tensor, seed: Tensor | None, *others: Any) -> list[Tensor]:
        next(self.calls)
        return super()._encode(numerics, x, seed, *others)


def test_a_quantizer_of_the_user_runs_every_time(device: torch.device) -> None:
    recipe = nc.recipe.CustomRecipe(qfactory=lambda role: Shifted(nc.DType.kFloat8E4M3), emulate=EMULATE)
    layer, counts = built(LAYERS["linear"], recipe, device), []
    for _ in range(4):
        before = next(Shifted.calls)
        train(layer, device, steps=1)
        counts.append(next(Shifted.calls) - before)
    assert len(set(counts)) == 1 and counts[0] > 3
    assert known() == ["stage", "stage"]


def test_what_watches_sees_operators(device: torch.device) -> None:
    layer = built(LAYERS["linear"], QUANTIZED["current"], device)
    train(layer, device)
    with FlopCounterMode(display=False) as counter:
        train(layer, device, steps=1)
    assert counter.get_total_flops() == 3 * 2 * 32 * 64 * 48


def test_under_autocast_of_torch_stages_run(device: torch.device) -> None:
    layer = built(LAYERS["linear"], QUANTIZED["current"], device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = [layer(torch.randn(32, 64, device=device)) for _ in range(3)]
    assert not replay._known and out[0].dtype == torch.bfloat16


# -- of stages ---------------------------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """What a stage may return: records of tensors and other values."""

    tensors: list[Tensor]
    name: str | None


@dataclass
class Record:
    """What it may not."""

    tensor: Tensor


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other)
    else:
        assert found == expected


def check(stage: Callable[..., Any], *inputs: Tensor, expected: str = "recording") -> None:
    """Several runs return what the stage returns, for other values each time."""
    with torch.no_grad():
        for at in range(5):
            given = [x + at if x.is_floating_point() else x for x in inputs]
            copies = [x.clone() for x in given]
            found = replay_of(stage, [*given], ())(*given)
            assert_same(found, stage(*copies))
            assert_same(given, copies)  # what it writes to, too
    assert known() == [expected]


def test_operators_in_place_views_and_records(device: torch.device) -> None:
    def stage(x: Tensor, y: Tensor) -> Any:
        y.add_(1)
        parts = x.split(2)
        whole = torch.empty_like(x).copy_(torch.cat([parts[1], parts[0]]))
        return whole, Outputs([x.t().contiguous(), y[1:] * 2], "name"), None, x

    check(stage, torch.randn(4, 8, device=device), torch.randn(3, device=device))


def test_text_is_never_code(device: torch.device) -> None:
    """What a stage hands on is a constant of the recording, and no part of its source."""
    planted = "floor'), planted(), ('"

    def stage(x: Tensor) -> Any:
        return torch.div(x, 2, rounding_mode="floor"), Outputs([x + 1], planted)

    check(stage, torch.randn(4, device=device))
    (recording,) = replay._known.values()
    assert planted in recording.__globals__.values() and "planted" not in recording.__code__.co_names


@pytest.mark.parametrize("offsets", [(0, 0, 0, 16, 32), (16, 16, 16, 0, 32)], ids=str)
def test_parts_are_relative(offsets: tuple[int, ...], device: torch.device) -> None:
    """A recording of a tensor that begins with its storage serves one that does not, and the reverse."""

    def stage(x: Tensor) -> Tensor:
        return x.as_strided((2,), (2,), x.storage_offset() + 4) * 2

    storage = torch.arange(64.0, device=device)
    with torch.no_grad():
        for offset in offsets:
            x = storage[offset : offset + 8]
            assert torch.equal(replay_of(stage, [x], ())(x), x[4::2] * 2)
    assert known() == ["recording"]


def test_a_number_off_the_device_is_read_again(device: torch.device) -> None:
    check(lambda x: x * x.sum().item(), torch.randn(4, device=device), expected="stage")


@pytest.mark.parametrize(
    "stage", [lambda x: x + 1 if x.sum() == 0 else x - 1, lambda x: x.new_zeros(x.nonzero().shape)]
)
def test_what_follows_from_data_follows_from_it_again(stage: Any, device: torch.device) -> None:
    with torch.no_grad():
        for x in (torch.zeros(3, device=device), torch.ones(3, device=device)) * 3:
            assert_same(replay_of(stage, [x], ())(x), stage(x))
    assert known() == ["stage"]


def test_a_tensor_from_elsewhere_is_read_again(device: torch.device) -> None:
    elsewhere = torch.ones(4, device=device)

    def stage(x: Tensor) -> Tensor:
        elsewhere.add_(1)
        return x * elsewhere

    x = torch.randn(4, device=device)
    with torch.no_grad():
        for at in range(4):
            assert torch.equal(replay_of(stage, [x], ())(x), x * (at + 2))
    assert known() == ["stage"]


def test_tensors_in_unknown_records_are_not_kept(device: torch.device) -> None:
    def stage(x: Tensor) -> Record:
        return Record(x * 2)

    with torch.no_grad():
        for at in range(4):
            x = torch.full((4,), float(at), device=device)
            assert torch.equal(replay_of(stage, [x], ())(x).tensor, x * 2)
    assert known() == ["stage"]


def test_one_tensor_in_two_places(device: torch.device) -> None:
    """Recorded, it would serve two tensors as if they were one."""

    def stage(x: Tensor, y: Tensor) -> Tensor:
        return x - y

    x, y = torch.randn(4, device=device), torch.randn(4, device=device)
    with torch.no_grad():
        for first, second in ((x, x), (x, x), (x, y), (y, x)):
            assert torch.equal(replay_of(stage, [first, second], ())(first, second), first - second)


def test_keys_tell_layouts_apart(device: torch.device) -> None:
    stage, x = (lambda x: (x.contiguous(), x.data_ptr() % 16)), torch.randn(8, 8, device=device)
    bits = torch.randn(72, device=device)
    with torch.no_grad():
        for _ in range(3):
            for one in (
                x,
                x.t(),
                x[::2, ::2],
                x[:4, :4],
                x.double(),
                bits[1:65].view(8, 8),
                bits[:64].view(8, 8),
            ):
                found, aligned = replay_of(stage, [one], ())(one)
                assert found.dtype == one.dtype and torch.equal(found, one) and aligned == one.data_ptr() % 16
    assert known() == ["recording"] * 6


def test_descriptors_of_tensors_are_made_again() -> None:
    """The grouped kernels of an H200 read tensors through them; each run has its own."""
    hopper = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    layout = pytest.importorskip("narrowcast.kernels.grouped_hopper").CODES
    x, y = (torch.zeros(256, 256, dtype=torch.float8_e4m3fn) for _ in range(2))
    descriptor = hopper.TensorDescriptor(x, [256, 256], [256, 1], [64, 128], layout)
    recording = replay.Recording(torch.rand_like, [x])
    made = eval(recording._expression(descriptor), {**recording.constants, "t0": y})
    assert type(made) is type(descriptor) and made.base is y
    for name in ("shape", "strides", "block_shape", "layout"):
        assert getattr(made, name) == getattr(descriptor, name)


def test_a_launch_that_a_profiler_wants_to_see_is_the_stage_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of launches are called by Triton's own way to start a kernel, which a recording goes around."""
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]))
    ran, started = [], []

    def stage(x: Tensor) -> Tensor:
        ran.append(x)
        y = torch.empty_like(x)
        recording.launched((lambda *given: started.append(given), (), False, None), (3,), [y], hooks)
        return y

    monkeypatch.setattr(replay, "current_stream", lambda device: 5)
    x = torch.zeros(7)
    recording = replay.Recording(stage, [x])
    with recording:
        result = stage(x)
    replayed = recording.function_of(result, [])
    assert replayed is not None
    y = replayed([x], x)
    assert started == [(3, 5, y.data_ptr())] and len(ran) == 1
    hooks.launch_enter_hook.calls.append(print)
    replayed([x], x)
    assert len(started) == 1 and len(ran) == 2


def test_random_numbers_differ(device: torch.device) -> None:
    x = torch.zeros(64, device=device)
    with torch.no_grad():
        drawn = [replay_of(torch.rand_like, [x], ())(x) for _ in range(5)]
    assert known() == ["recording"] and not any(
        torch.equal(one, other) for one, other in itertools.combinations(drawn, 2)
    )


def test_nothing_is_kept_and_lists_are_emptied(device: torch.device) -> None:
    """What a list holds goes as soon as it was read; the recording holds nothing."""

    def stage(large: list[Tensor]) -> Tensor:
        y = large.pop() * 2
        return y + 1

    with torch.no_grad():
        for _ in range(4):
            large = [torch.randn(4, device=device)]
            seen = weakref.ref(large[0])
            result = replay_of(stage, [*large], ())(large)
            assert not large
            gc.collect()
            assert seen() is None and result.shape == (4,)
    assert known() == ["recording"]


MADE: list[weakref.ref[Tensor]] = []
ALIVE: list[list[bool]] = []


@torch.library.custom_op("narrowcast_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    ALIVE.append([made() is not None for made in MADE])
    y = 2 * x
    MADE.append(weakref.ref(y))
    return y


def test_a_recording_lets_go_of_what_no_later_line_reads(device: torch.device) -> None:
    x = torch.randn(4, device=device)

    def stage(x: Tensor) -> Tensor:
        return twice(twice(twice(x)))

    with torch.no_grad():
        for _ in range(4):
            MADE.clear()
            ALIVE.clear()
            assert torch.equal(replay_of(stage, [x], ())(x), 8 * x)
    assert known() == ["recording"]
    assert ALIVE == [[], [True], [False, True]]


def test_an_error_leaves_nothing_behind(device: torch.device) -> None:
    def stage(x: Tensor) -> Tensor:
        if fails:
            raise ValueError("now")
        return x + 1

    x = torch.zeros(4, device=device)
    with torch.no_grad():
        for fails in (False, True, False, False, False):
            if not fails:
                assert torch.equal(replay_of(stage, [x], ())(x), x + 1)
                continue
            with pytest.raises(ValueError, match="now"):
                replay_of(stage, [x], ())(x)
            assert torch._C._len_torch_dispatch_stack() == 0
    assert known() == ["recording"]


def test_shapes_that_never_come_back_are_forgotten(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LIMIT", 8)
    with torch.no_grad():
        for size in range(1, 40):
            x = torch.zeros(size, device=device)
            replay_of(torch.neg, [x], ())(x)
            assert len(replay._known) <= 8


def test_with_gradients_stages_run(device: torch.device) -> None:
    x = torch.zeros(4, device=device, requires_grad=True)
    assert all(replay_of(torch.neg, [x], ()) is torch.neg for _ in range(4)) and not replay._known


@pytest.mark.skipif(not AVAILABLE, reason="needs Triton, which this PyTorch came without")
def test_kernels_are_launched_again(device: torch.device) -> None:
    from narrowcast.formats import E4M3, E5M2
    from narrowcast.kernels import float8, float8_block

    def stage(x: Tensor, amax: Tensor) -> Any:
        scale = torch.full((1,), 2.0, dtype=torch.float32, device=x.device)
        delayed = float8.quantize(x, scale, E4M3, rowwise=True, columnwise=True, amax=amax)
        current = float8.quantize_current(x, E5M2, power_2=False, epsilon=0.0, rowwise=True, columnwise=True)
        blocks = float8_block.quantize(
            x, E4M3, rowwise=True, columnwise=True, block_dim=1, power_2=True, epsilon=0.0
        )
        return delayed, current, blocks

    check(
        stage,
        torch.randn(20, 48, device=device).bfloat16(),
        torch.zeros(1, dtype=torch.float32, device=device),
    )
