"""What the tests of the fused modules share: one step with all gradients, eager against compiled, bitwise."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from recipes import DEVICE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc

Results = dict[str, Tensor]
TOKENS = 40

LAYERS: dict[str, Callable[..., Any]] = {
    "linear": lambda **options: nc.Linear(32, 48, device="cpu", **options),
    "split": lambda **options: nc.Linear(32, 48, device="cpu", parameters_split=("a", "b"), **options),
    "layernorm_linear": lambda **options: nc.LayerNormLinear(32, 48, device="cpu", **options),
    "layernorm_mlp": lambda **options: nc.LayerNormMLP(32, 48, device="cpu", **options),
    "grouped": lambda **options: nc.GroupedLinear(2, 32, 48, device="cpu", **options),
    "grouped_single": lambda **options: nc.GroupedLinear(
        2, 32, 48, device="cpu", single_grouped_parameter=True, **options
    ),
}
"""Every kind of layer with linear layers inside, 32 features in; a grouped one has two groups."""


def run_layer(layer: Any, x: Tensor, forward: Any = None, **options: Any) -> Tensor:
    """One of ``LAYERS``, or its compiled form, on 8 rows."""
    given = ([3, 5],) if isinstance(layer, nc.GroupedLinear) else ()
    return (layer if forward is None else forward)(x, *given, **options)


def make_input(features: int, *lead: int, seed: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*(lead or (TOKENS,)), features, generator=generator)
    return values.to(dtype).to(DEVICE).requires_grad_(True)


def step(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    recipe: nc.recipe.Recipe | None = None,
    forward: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Results:
    """Outputs ``out0...``, and the gradients ``d <parameter>``, and ``d input`` or ``d input0...``, of what wants one.

    Random numbers repeat.
    """
    torch.manual_seed(7)
    given = [inputs] if isinstance(inputs, Tensor) else inputs
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        result = (module if forward is None else forward)(*given, **kwargs)
    outs = [out for out in (result if isinstance(result, tuple) else (result,)) if out is not None]
    return {**{f"out{i}": out.detach() for i, out in enumerate(outs)}, **gradients(module, inputs, outs)}


def loss_of(outs: Sequence[Tensor]) -> Any:
    return sum((i + 1) * out.float().square().sum() for i, out in enumerate(outs) if out.requires_grad)


def gradients(
    module: nn.Module, inputs: Tensor | Sequence[Tensor], outs: Sequence[Tensor], **options: Any
) -> Results:
    """Return the gradients of :func:`step`; ``options``: of ``torch.autograd.grad``."""
    single = isinstance(inputs, Tensor)
    named = {"input": inputs} if single else {f"input{i}": x for i, x in enumerate(inputs)}
    wanted = {
        f"d {name}": x for name, x in {**dict(module.named_parameters()), **named}.items() if x.requires_grad
    }
    if not wanted:
        return {}
    grads = torch.autograd.grad(loss_of(outs), list(wanted.values()), allow_unused=True, **options)
    return {name: grad for name, grad in zip(wanted, grads) if grad is not None}


def assert_equal(ours: Any, theirs: Any) -> None:
    """Equal names or as many tensors, of equal shapes, dtypes and values."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def assert_same(ours: Any, theirs: Any) -> None:
    """As :func:`assert_equal`, and no tensor is all zero."""
    assert_equal(ours, theirs)
    for name, a in ours.items() if isinstance(ours, dict) else enumerate(ours):
        assert not a.numel() or a.float().abs().sum() > 0, f"{name} is zero"


def compare_compiled(
    module: nn.Module,
    features: int,
    recipe: nc.recipe.Recipe | None,
    *,
    steps: int = 2,
    dynamic: bool | None = None,
    backend: str = "aot_eager",
    calls: list[dict[str, Any]] | None = None,
) -> None:
    """Several steps of a module and of its compiled copy; ``calls``: keyword arguments of each forward."""
    compiled = copy.deepcopy(module)
    forward = torch.compile(compiled, fullgraph=True, dynamic=dynamic, backend=backend)
    for index, kwargs in enumerate(calls or [{}] * steps):
        x = make_input(features, TOKENS + (8 * index if dynamic else 0), seed=index)
        ours = step(compiled, x, recipe, forward, **kwargs)
        assert_same(ours, step(module, x, recipe, **kwargs))


def check_retained_graph(module: nn.Module, x: Tensor, recipe: Any) -> None:
    """A second backward over a retained graph repeats the first, random bits included."""
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        loss = module(x).float().square().sum()
    results = []
    for retain in (True, False):
        torch.manual_seed(7)
        results.append(torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=retain))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def check_no_grad(module: nn.Module, x: Tensor, recipe: Any) -> None:
    """Without gradients the output has the same bits."""
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        expected = module(x)
        for manager in (torch.no_grad, torch.inference_mode):
            with manager():
                assert torch.equal(module(x), expected)


def randomized(module: nn.Module) -> nn.Module:
    """With norm parameters and biases that are not 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return module


GEMM = torch.ops.narrowcast.gemm.default
QUANTIZE = tuple(
    getattr(torch.ops.narrowcast, name).default
    for name in ("quantize", "quantize_operand", "quantize_keeping_amax")
)


class Operators(TorchDispatchMode):
    """What ran: GEMMs by kind, quantizations by the directions they make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GEMM:
            self.seen[args[0]] += 1
        elif func in QUANTIZE:
            usages = args[1].get_usages()
            self.seen["+".join(name for name, on in usages.items() if on)] += 1
        return func(*args, **(kwargs or {}))
