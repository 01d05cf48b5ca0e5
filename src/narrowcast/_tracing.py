"""What must be done for real while the compiler traces: state to be made, values to be remembered.

Traced code cannot make a buffer (it would be a result of the graph) nor keep a value (a graph must not depend on what
it wrote). ``torch._dynamo.comptime`` runs a function at that very point of the trace, on the real objects; what the
traced code reads next is what that function left, guarded as if it had always been there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from typing import Any

import torch


def traced_local(context: Any, name: str) -> Any:
    """The object that a local variable of the traced function stands for; of records made in the graph, an equal one.

    None where that has parts which are neither constants nor found outside of the graph.
    """
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    with contextlib.suppress(NotImplementedError):
        return _real(variable, context._i_will_not_complain_if_bc_breaks_InstructionTranslator())
    return None


def refuse_in_one_graph(context: Any, reason: str) -> None:
    """Say why the traced code cannot be part of a graph, where it must be (``fullgraph=True``).

    Raises:
        RuntimeError: the compiler's own kind, with ``reason`` in its first line.
    """
    if context._i_will_not_complain_if_bc_breaks_InstructionTranslator().one_graph:
        raise torch._dynamo.exc.Unsupported(reason)  # type: ignore[attr-defined]


def in_eager(function: Any, *operands: Any, **options: Any) -> Any:
    """``function(*operands, **options)``, in traced code outside of any graph."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it would take seconds
        function = torch.compiler.disable(function)
    return function(*operands, **options)


def once_differentiable(backward: Any) -> Any:
    """PyTorch's decorator of this name for the backward of an autograd function, where gradients are recorded.

    Most backwards record no gradients. The decorator would do nothing there, and costs the host as much as a launch.
    """
    recorded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return (recorded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are no more than memory, whose shapes are numbers."""

# What eager code looks at before it goes past PyTorch's dispatcher; not for traced code.
in_transform = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]
count_modes = torch._C._len_torch_dispatch_stack
is_autocast = torch._C._is_any_autocast_enabled
is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def refused_in_transform(what: str, instead: str = "") -> NotImplementedError:
    """What to raise for ``what`` inside a transform; ``instead``: what else the caller can do."""
    return NotImplementedError(
        f"{what} is inside a transform of torch.func (grad, vmap, jvp), which cannot see what its backward reads; use "
        f"torch.autograd.grad with torch.func.functional_call{instead}"
    )


def _real(variable: Any, translator: Any) -> Any:
    if hasattr(variable, "realize"):
        variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if isinstance(
        getattr(variable, "items", None), list
    ):  # a tuple or list that the traced code put together
        return [_real(item, translator) for item in variable.items]
    if hasattr(variable, "get_function"):
        return variable.get_function()
    if getattr(variable, "source", None) is not None:
        return variable.value
    kind: Any = variable.python_type()
    if not hasattr(kind, "__dataclass_fields__"):
        raise NotImplementedError
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: _real(variable.var_getattr(translator, name), translator) for name in names})
