"""Checks for operations and lists of them.

``check(make, shapes)`` is the whole set: eager against compiled (``aot_eager``, fullgraph), with dynamic shapes,
without gradients, two backwards over one graph, a second derivative, and recomputation. ``make()`` builds the module, a
:class:`narrowcast.ops.Sequential` or a single operation; ``shapes`` are those of its inputs, main one first::

    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
    def test_bias(recipe):
        check(lambda: nc.ops.Bias(48, device=DEVICE), [(40, 48)], recipe)

Comparisons are bitwise. ``modules.step`` gives one step's results by name, and :func:`unfused` switches the registered
fusions off, to compare a fused operation with the list it stands for::

    with unfused():
        reference = step(make(), inputs, recipe)
    assert_same(step(make(), inputs, recipe), reference)
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._functorch.config
from modules import assert_same, gradients, loss_of, step
from recipes import DEVICE
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.ops.registry import REGISTRY

Make = Callable[[], nn.Module]


def make_inputs(
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    grad: bool = True,
) -> list[Tensor]:
    """Normally distributed tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]
    return [tensor.requires_grad_(grad) for tensor in made]


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """No fusions at all."""
    kept = REGISTRY.joint, REGISTRY.forward, REGISTRY.backward
    REGISTRY.joint, REGISTRY.forward, REGISTRY.backward = [], [], []
    REGISTRY.version += 1
    try:
        yield
    finally:
        REGISTRY.joint, REGISTRY.forward, REGISTRY.backward = kept
        REGISTRY.version += 1


@contextlib.contextmanager
def only(
    *, forward: Sequence[Any] = (), backward: Sequence[Any] = (), joint: Sequence[Any] = ()
) -> Iterator[None]:
    """These fusions and no others."""
    with unfused():
        REGISTRY.joint, REGISTRY.forward, REGISTRY.backward = list(joint), list(forward), list(backward)
        yield


def check(
    make: Make,
    shapes: Sequence[tuple[int, ...]],
    recipe: nc.recipe.Recipe | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> None:
    """Everything below; ``kwargs`` go to the forward."""
    torch.manual_seed(0)
    module = make()
    check_compiled(module, shapes, recipe, dtype=dtype, dynamic=True, **kwargs)
    check_without_gradients(module, shapes, recipe, dtype=dtype, **kwargs)
    check_backwards(module, shapes, recipe, dtype=dtype, **kwargs)
    check_recomputed(module, shapes, recipe, dtype=dtype, **kwargs)


def check_compiled(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    recipe: nc.recipe.Recipe | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    dynamic: bool | None = None,
    backend: str = "aot_eager",
    steps: int = 2,
    **kwargs: Any,
) -> None:
    """Steps of a module and of its compiled copy; with ``dynamic`` the leading dim changes from step to step."""
    eager, compiled = copy.deepcopy(module), copy.deepcopy(module)
    forward = torch.compile(compiled, fullgraph=True, dynamic=dynamic, backend=backend)
    for index in range(steps):
        grown = [(shape[0] + 8 * index, *shape[1:]) for shape in shapes] if dynamic else shapes
        inputs = make_inputs(grown, dtype=dtype, seed=index)
        assert_same(step(compiled, inputs, recipe, forward, **kwargs), step(eager, inputs, recipe, **kwargs))


def check_without_gradients(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    recipe: nc.recipe.Recipe | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> None:
    """The same outputs under ``no_grad``, and with nothing that wants a gradient."""
    inputs = make_inputs(shapes, dtype=dtype)
    expected = {
        k: v for k, v in step(copy.deepcopy(module), inputs, recipe, **kwargs).items() if k.startswith("out")
    }
    inputs = [x.detach() for x in inputs]
    with torch.no_grad():
        assert_same(step(copy.deepcopy(module).requires_grad_(False), inputs, recipe, **kwargs), expected)
    assert_same(step(copy.deepcopy(module).requires_grad_(False), inputs, recipe, **kwargs), expected)


def check_backwards(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    recipe: nc.recipe.Recipe | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> None:
    """Two backwards over one graph agree; a third without the graph and a second derivative are RuntimeErrors."""
    module, inputs = copy.deepcopy(module), make_inputs(shapes, dtype=dtype)
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        result = module(*inputs, **kwargs)
    outs = list(result) if isinstance(result, tuple) else [result]
    torch.manual_seed(3)
    first = gradients(module, inputs, outs, retain_graph=True)
    torch.manual_seed(3)
    assert_same(gradients(module, inputs, outs, retain_graph=True), first)
    differentiable = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(loss_of(outs), differentiable, create_graph=True, allow_unused=True)
    found = [grad for grad in grads if grad is not None and grad.requires_grad]
    assert found
    with pytest.raises(RuntimeError):
        torch.autograd.grad(sum(grad.float().sum() for grad in found), differentiable)


def check_recomputed(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    recipe: nc.recipe.Recipe | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> None:
    """``narrowcast.checkpoint``, which is PyTorch's non-reentrant one, gives the same gradients."""
    plain, recomputed = copy.deepcopy(module), copy.deepcopy(module)
    inputs = make_inputs(shapes, dtype=dtype)

    def forward(*args: Tensor, **options: Any) -> Any:
        return nc.checkpoint(recomputed, *args, use_reentrant=False, **options)

    assert_same(step(recomputed, inputs, recipe, forward, **kwargs), step(plain, inputs, recipe, **kwargs))
