"""Training steps compiled for a GPU and run on twins, beside those of eager code on the CPU: ``steps.py NAME...``."""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.config
import triton
from interpreting import fast_interpreter
from torch import Tensor, nn

from .pretended_gpu import pretend

pretend()  # before narrowcast asks

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import narrowcast as nc  # noqa: E402
import narrowcast.kernels  # noqa: E402
from narrowcast.functional import gemm  # noqa: E402
from narrowcast.kernels import launch  # noqa: E402
from narrowcast.upstream import lowering  # noqa: E402

from . import twins  # noqa: E402

FAKE = FakeTensorMode(allow_non_fake_inputs=True)
ROWS, WIDTH = 33, 64
DELAYED = nc.recipe.DelayedScaling(amax_history_len=4)


class Model(nn.Module):
    """A linear layer, a feed-forward block, a norm with a linear layer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.first = nc.Linear(WIDTH, 48, **place)
        self.block = nc.LayerNormMLP(48, 80, activation="swiglu", normalization="RMSNorm", **place)
        self.last = nc.LayerNormLinear(48, WIDTH, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


class Twice(Model):
    """The same layers, two times in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Checkpointed(Model):
    """The middle is run again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.block, self.first(x), use_reentrant=False)
        return self.last(x)


class Operations(nn.Module):
    """A list of operations."""

    def __init__(self, device: str) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.all = nc.ops.Sequential(
            nc.ops.RMSNorm(WIDTH, **place),
            nc.ops.Linear(WIDTH, 96, **place),
            nc.ops.SwiGLU(),
            nc.ops.Linear(48, WIDTH, **place),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.all(x)


class Routed(nn.Module):
    """Rows that travel to experts and back, in fixed numbers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH, device=device, dtype=torch.bfloat16))
        self.fixed = nc.distributed.MoEDispatch(8, capacity=100, align_size=16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias
        chosen = x.detach()[:, :8]
        return self.fixed(x, chosen.float(), chosen > 0.2, ROWS * 4, lambda rows, _: rows * 2)


class Experts(nn.Module):
    """Rows of groups of any size, whose products the graph holds whole."""

    def __init__(self, device: str) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "params_dtype": torch.bfloat16}
        self.all = nc.GroupedLinear(3, WIDTH, WIDTH, **place)
        self.register_buffer("splits", torch.empty(3, dtype=torch.int64, device=device))
        for group, rows in enumerate((ROWS - 5, 0, 5) if device == "cpu" else ()):
            self.splits[group] = rows

    def forward(self, x: Tensor) -> Tensor:
        return self.all(x, self.splits)


Named = dict[str, Tensor]


class Eager:
    """The model in eager code on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def evaluate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def gradients(self, y: Tensor, grad: Tensor) -> Named:
        names, parameters = zip(*self.model.named_parameters())
        return dict(zip(names, torch.autograd.grad(y, parameters, grad)))

    def value(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def renew(self) -> None:
        nc.renew_delayed_scaling(self.model)


class Compiled(Eager):
    """Its copy, compiled for the GPU; parameters and buffers have those of ``real`` for twins."""

    def __init__(self, real: nn.Module, make: Callable[[str], nn.Module], recipe: Any, by: str) -> None:
        self.real = real
        with FAKE:
            super().__init__(given(make("cuda"), recipe, by))
            for ours, theirs in (
                (self.model.named_parameters(), dict(real.named_parameters())),
                (self.model.named_buffers(), dict(real.named_buffers())),
            ):
                for name, tensor in ours:
                    twins.give_twin(tensor, theirs[name])
            self.run = torch.compile(lambda x: self.model(x), fullgraph=True)

    def _fake(self, x: Tensor) -> Tensor:
        with FAKE:
            return twins.give_twin(torch.empty(x.shape, dtype=x.dtype, device="cuda"), x)

    def evaluate(self, x: Tensor) -> Tensor:
        with FAKE, torch.no_grad():
            return twins.twin_of(self.run(self._fake(x)))

    def forward(self, x: Tensor) -> Tensor:
        with FAKE:
            return self.run(self._fake(x))

    def gradients(self, y: Tensor, grad: Tensor) -> Named:
        with FAKE:
            return super().gradients(y, self._fake(grad))

    def value(self, tensor: Tensor) -> Tensor:
        return twins.twin_of(tensor).clone()

    def renew(self) -> None:
        nc.renew_delayed_scaling(self.real)


def given(model: nn.Module, recipe: nc.recipe.Recipe, by: str) -> nn.Module:
    """The model with a recipe: the root's, or each layer's own."""
    if by == "root":
        return nc.set_recipe(model, recipe)
    for layer in model.modules():
        if hasattr(layer, "recipe"):
            layer.recipe = recipe
    return model


def plain(side: Eager, xs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    for x in xs:
        y = side.forward(x)
        yield "output", side.value(y)
        yield from backward(side, y, xs[0])
        side.renew()


def backward(side: Eager, y: Tensor, grad: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, gradient in side.gradients(y, grad).items():
        yield f"gradient of {name}", side.value(gradient)


def with_evaluations(side: Eager, xs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """In training mode: what they collect counts, from the next step on."""
    for x, larger in zip(xs, xs[1:]):
        yield "evaluated", side.evaluate(larger)
        yield from plain(side, [x])


def with_two_forwards(side: Eager, xs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Before their backwards."""
    ys = [side.forward(x) for x in xs]
    for y in ys:
        yield "output", side.value(y)
        yield from backward(side, y, xs[0])
    side.renew()


def with_smaller_forwards(side: Eager, xs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Two steps of several forwards each, whose amaxes fall, then rise."""
    yield from with_two_forwards(side, xs[::-1])
    yield from with_two_forwards(side, xs)


SCENARIOS: dict[str, tuple[Any, nc.recipe.Recipe, str, Any]] = {
    "steps, root": (Model, DELAYED, "root", plain),
    "steps, own": (Model, DELAYED, "own", plain),
    "evaluations, root": (Model, DELAYED, "root", with_evaluations),
    "evaluations, own": (Model, DELAYED, "own", with_evaluations),
    "two forwards": (Model, DELAYED, "root", with_two_forwards),
    "twice": (Twice, DELAYED, "root", plain),
    "checkpointed": (Checkpointed, DELAYED, "root", plain),
    "checkpointed, two forwards": (Checkpointed, DELAYED, "root", with_smaller_forwards),
    "operations": (Operations, DELAYED, "root", with_evaluations),
    "routed": (Routed, DELAYED, "own", plain),
    "experts": (Experts, DELAYED, "root", plain),
    "experts, current": (Experts, nc.recipe.Float8CurrentScaling(), "root", plain),
    "experts, block": (Experts, nc.recipe.Float8BlockScaling(), "root", plain),
    "nvfp4": (
        Model,
        nc.recipe.NVFP4BlockScaling(emulate=True, disable_stochastic_rounding=True),
        "root",
        plain,
    ),
    "current": (Model, nc.recipe.Float8CurrentScaling(), "root", plain),
}


def differences(name: str) -> list[str]:
    """What of a scenario's results, and of the state after it, is not equal to the bit."""
    make, recipe, by, history = SCENARIOS[name]
    torch.manual_seed(0)
    xs = [torch.randn(ROWS, WIDTH).mul_(1 + 3 * i).bfloat16() for i in range(3)]
    real = given(make("cpu"), recipe, by)
    eager = copy.deepcopy(real)
    found, wanted = (list(history(side, xs)) for side in (Compiled(real, make, recipe, by), Eager(eager)))
    # Sums over rows differ in their order; kernels of Inductor's own, which add the gradients of two uses, are
    # interpreted with bf16 rounded toward zero.
    rounded = ("weight", "bias") if make is Twice else ("bias",)
    wrong = [
        f"{at}: {label}"
        for at, ((label, a), (_, b)) in enumerate(zip(found, wanted, strict=True))
        if not (_close(a, b) if label.rstrip("0123").endswith(rounded) else torch.equal(a, b))
    ]
    state = dict(eager.named_buffers())
    return wrong + [key for key, value in real.named_buffers() if not torch.equal(value, state[key])]


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether they differ by no more than rounding of bf16."""
    return torch.allclose(a, b, rtol=2**-7, atol=2**-7 * b.abs().max().item())


def check_writes() -> None:
    """What lowering says that a launch may write to has all that PyTorch finds."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from torch._inductor.virtualized import V

    name = next(
        name for name in ("identify_mutated_tensors", "identify_accessed_tensors") if hasattr(wrap, name)
    )
    find = getattr(wrap, name)

    def checked(kernel: Any, kwargs: dict[str, Any], *descriptors: Any) -> Any:
        found = told(kernel, kwargs, *descriptors)
        node = getattr(V.graph, "current_node", None)
        # of grouped casts PyTorch says that they write to their input, which takes part in finding where they write
        precise = not kernel.fn.__module__.rpartition(".")[2].startswith("grouped_")
        if precise and node is not None and "narrowcast_written" in node.meta:
            theirs = find(kernel, kwargs, *descriptors)
            sides = [
                x if isinstance(x, list) else [one.name for one in x.read_writes.writes]
                for x in (theirs, found)
            ]
            tensors = {key for key, value in kwargs.items() if hasattr(value, "realize")}
            missing = {*sides[0]} & tensors - {*sides[1]}
            assert not missing, (kernel, missing)
        return found

    lowering.hear_writes()
    told = getattr(wrap, name)
    setattr(wrap, name, functools.wraps(told)(checked))


def prepare() -> None:
    """Kernels take the branches that the interpreter knows; both sides multiply alike; nothing is kept on disk."""
    check_writes()
    for module in pkgutil.iter_modules(narrowcast.kernels.__path__):
        try:
            loaded: Any = importlib.import_module(f"narrowcast.kernels.{module.name}")
        except ImportError:  # kernels of one kind of GPU, in another language
            continue
        if hasattr(loaded, "EMULATE"):
            loaded.EMULATE = triton.language.constexpr(True)
    launch.INTERPRETING = True
    gemm._multiply_decoded = _multiply_decoded
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.joint_graph_constant_folding = False  # it would compute on the GPU
    torch._functorch.config.enable_autograd_cache = False
    twins.run_graphs_on_twins()


def _multiply_decoded(a: Any, b: Any, bias: Any, dtype: torch.dtype) -> Tensor:
    scale = None if a.scale is None else a.scale * b.scale
    return twins.exact_product(a.values, b.values.t(), scale, bias, dtype)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    prepare()
    with fast_interpreter(True):  # although a GPU seems to be here
        for name in sys.argv[1:]:
            torch._dynamo.reset()
            print(f"{name}: {', '.join(differences(name)) or 'equal'}", flush=True)
