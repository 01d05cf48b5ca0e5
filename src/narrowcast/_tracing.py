"""Code that differs in a compiled graph: work on real objects, refusals, and choices that only eager code has.

Traced code cannot make a buffer (it would be a result of the graph) nor keep a value (a graph must not depend on what
it wrote). ``torch._dynamo.comptime`` runs a function at that very point of the trace, on the real objects; what the
traced code reads next is what that function left, guarded as if it had always been there.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.torch_version import TorchVersion

from .upstream import opaque
from .upstream.compiler import held_compiling, is_dynamo_loaded, is_tracer_running
from .upstream.functionalization import current_mode
from .upstream.tensors import count_modes

_FOLDER = str(Path(__file__).parent)


def while_tracing(function: Callable[[Any], None]) -> bool:
    """Run ``function(context)`` for real at this point of the trace, and do nothing in eager code.

    Its context is what :func:`traced_local` reads the locals of the caller with.

    Returns:
        Whether code is traced.
    """
    if not torch.compiler.is_compiling():  # a call less, in every forward, than is_eager
        return False
    from .upstream.dynamo import comptime  # loads Dynamo, which is there already where code is traced

    comptime(function)
    return True


def traced_local(context: Any, name: str) -> Any:
    """Return the object that a local variable of the caller of :func:`while_tracing` stands for.

    Of records made in the graph, an equal one. None if that has parts which are neither constants nor found outside
    of the graph.
    """
    from .upstream import dynamo

    return dynamo.traced_local(context, name, frames_up=1)


def after(grad: Any, tensor: Tensor) -> Tensor:
    """Return ``tensor``, in a graph available only once ``grad`` is: a tensor, quantized storage, or None for now.

    Else the compiler finds the operators of the forward again, and saves their results instead of repeating them.
    """
    if grad is None or not torch.compiler.is_compiling():
        return tensor
    seen = grad if isinstance(grad, Tensor) else next(b for b in grad.get_data_tensors() if b is not None)
    return torch.where(seen.reshape(-1)[:1].float().sum().isnan(), tensor, tensor)


def is_known(condition: Any) -> bool:
    """Return a condition on sizes; False in traced code whose sizes are not known, which is not guarded either."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def refuse_in_one_graph(context: Any, reason: str) -> None:
    """Raise the reason why the traced code cannot be part of a graph (``fullgraph=True``).

    Raises:
        RuntimeError: the compiler's own kind, with ``reason`` in its first line.
        UpstreamError: this release of PyTorch cannot have quantizers in graphs, ``fullgraph`` or not.
    """
    from .upstream import dynamo

    if (
        not opaque.AVAILABLE
    ):  # no graph can have a quantizer: eager code in its place would be slow in silence
        raise opaque.missing()
    if dynamo.is_one_graph(context):
        raise dynamo.Unsupported(reason)


def in_eager(function: Any, *operands: Any, **options: Any) -> Any:
    """Call ``function(*operands, **options)`` in traced code, outside any graph."""
    if is_dynamo_loaded():  # else nothing is compiled, and loading it would take seconds
        function = torch.compiler.disable(function)
    return function(*operands, **options)


class _OnceDifferentiable(torch.autograd.Function):
    """Passes the first ``count`` gradients on, and has none itself; they depend on all of them."""

    @staticmethod
    def forward(ctx: Any, count: int, *gradients: Any) -> Any:
        return gradients[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "narrowcast differentiates once, and this is a second derivative; use layers of torch.nn "
            "here, or narrowcast.Linear inside autocast(enabled=False), which is exact"
        )


def once_differentiable(backward: Any) -> Any:
    """Decorate the backward of an autograd function: differentiating its gradients raises, and says what to use.

    Most backwards record no gradients, and then it only calls the backward.
    """
    held = held_compiling(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            if held is backward or torch.compiler.is_dynamo_compiling() or not is_tracer_running():
                return backward(ctx, *gradients)  # eager code takes no hop more
            return held(ctx, *gradients)
        with torch.no_grad():
            found = held(ctx, *gradients)
        if not any(isinstance(one, Tensor) and one.requires_grad for one in gradients):
            return found
        several = found if isinstance(found, tuple) else (found,)
        recorded = [one if one is None else one.detach().requires_grad_() for one in several]
        # the received ones lead to what was differentiated: autograd.grad runs what is on a path to its inputs
        refusing = _OnceDifferentiable.apply(len(recorded), *recorded, *gradients)
        return refusing if isinstance(found, tuple) else refusing[0]

    return run


_BY_KEY: dict[str, Any] = {}


def give_key(value: Any, text: str) -> None:
    """Set ``value.key``, which stands for a value in graphs, of this process and of those that read its caches.

    Args:
        text: the same for values that do the same, in every process; "" where nothing says so, and then no other
            process has the key.
    """
    digest = hashlib.sha256(text.encode()).hexdigest() if text else uuid.uuid4().hex
    key = f"{type(value).__name__}_{digest[:32]}"
    _BY_KEY.setdefault(key, value)
    object.__setattr__(value, "key", key)


def by_key(key: str) -> Any:
    """Return the value of a key."""
    return _BY_KEY[key]


record: Any = tuple.__new__
"""``record(Class, (first, second))`` is ``Class(first, second)`` of a named tuple, given every field.

The compiler takes two steps for it and some fifty for the call of a class. Eager code calls no Python for it.
"""


def slice_of(places: Sequence[int]) -> slice | None:
    """Return the slice that takes these elements of a list, which the compiler reads at once; None if there is none."""
    if not places:
        return slice(0, 0, 1)
    step = places[1] - places[0] if len(places) > 1 else 1
    taken = slice(places[0], places[-1] + 1, step)
    return taken if [*range(places[-1] + 1)][taken] == [*places] else None


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are no more than memory, whose shapes are numbers."""


# In a graph, tensors under torch.func report requires_grad=False (seen on 2.11 and 2.13, not on 2.15).
_HIDES_GRADIENTS = TorchVersion(torch.__version__) < "2.15"

records_transforms: Callable[[], bool] = bool if _HIDES_GRADIENTS else is_dynamo_compiling
"""Return whether code is traced that need not ask for a transform, as its backward is right there."""


def refuse_in_transform(what: str, instead: str = "", plans_backward: bool = True) -> None:
    """Refuse ``what`` inside a transform, which the caller has found, where its gradients would be wrong.

    In eager code that is everywhere. A graph records the backward as any other code; what is computed only where
    ``requires_grad`` is right there from PyTorch 2.15 on.

    Args:
        instead: what else the caller can do.
        plans_backward: ``what`` reads ``requires_grad``.
    Raises:
        NotImplementedError: in eager code.
        RuntimeError: in a graph that hides what requires a gradient.
    """
    use = f"use torch.autograd.grad with torch.func.functional_call{instead}"
    if not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{what} is inside a transform of torch.func (grad, vmap, jvp), which cannot see what its backward reads; "
            f"{use}"
        )
    if _HIDES_GRADIENTS and plans_backward:
        raise RuntimeError(
            f"{what} is inside a compiled transform of torch.func (grad, vmap, jvp), where this PyTorch does not say "
            f"what requires a gradient; {use}, or PyTorch 2.15"
        )


def refuse_in_graphs(message: str, error: type[Exception] = RuntimeError) -> None:
    """Raise an error with this message in traced code, and do nothing in eager code.

    Between graphs the compiler runs a caller for real, and would still trace ``is_eager``, a frame of its own.
    """
    if torch.compiler.is_compiling():
        raise error(message)


def warn(message: str) -> None:
    """Warn of a call, at the user's line; traced code warns while it is traced."""
    if not while_tracing(_warn_while_tracing):
        warnings.warn(message, stacklevel=users_level())


def users_level() -> int:
    """Return the ``stacklevel`` at which the caller's warning names the first line outside of this package."""
    callers = reversed(traceback.extract_stack()[:-1])
    ours = itertools.takewhile(lambda caller: caller.filename.startswith(_FOLDER), callers)
    return 1 + sum(1 for _ in ours)


def _warn_while_tracing(context: Any) -> None:
    warnings.warn(traced_local(context, "message"), stacklevel=2)


def warn_of_old_name(message: str) -> None:
    """Warn that a name is deprecated, at the user's line; traced code does not warn."""
    if can_check():
        warnings.warn(message, DeprecationWarning, stacklevel=users_level())


def is_eager() -> bool:
    """Return whether code runs on real objects, rather than being traced. Its other names say why a caller asks."""
    return not torch.compiler.is_compiling()


can_check = is_eager
"""A check or a log sees the objects and numbers themselves."""
can_remember = is_eager
"""A call may write to objects for the next one. A graph repeats no such write."""
can_overwrite = is_eager
"""A result may be written over an operand that ends here. A graph plans its memory."""
can_return_quantized = is_eager
"""Functions may hand on quantized tensors. A graph hands on values."""
has_addresses = is_eager
"""Tensors are memory that has an address."""


def host_values(x: Tensor) -> Any:
    """Return the values of ``x`` as a list, and refuse the recording of what runs now, which would repeat them.

    No dispatch mode sees ``tolist``.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the host must read how many rows each group has, which a CUDA graph cannot hold: the quantizer finds no "
            "groups on the device, or the mode is batch-invariant; leave the layer out of the capture, or use a "
            "quantizer of narrowcast or a subclass of MXFP8Quantizer or Float8BlockQuantizer"
        )
    if count_modes() and hasattr(mode := current_mode(), "refuse"):
        mode.refuse()
    return x.tolist()


def host_reads(x: Tensor) -> bool:
    """Return whether Python may look at the values of ``x``: on a CPU, in eager code."""
    return x.device.type == "cpu" and has_addresses()


def release(*lists: list[Any]) -> None:
    """Let go of tensors before their memory is needed for others; a graph does that by itself."""
    if can_overwrite():
        for tensors in lists:
            tensors.clear()
