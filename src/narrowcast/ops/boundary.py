"""The autograd boundary of a list of operations: one function, whose two halves run them forwards and backwards.

Compilers trace straight through it: what the operations compute is PyTorch's or an operator of this library. Rules of
this file, each paid for with a compiler experiment: nothing outside is written to while tracing; the output is detached
or a copy of an input, and extra outputs are fresh views; no size is put on the context; the stored contexts are never
written to by a backward.

The scales of the backward are saved like any tensor, so that every backward reads those of its forward. Lists of the
library's operations are replayed (:mod:`..functional.replay`), both halves as a whole: a recording stands for the
loops over the operations, and the contexts of the forward that was recorded serve all calls with an equal key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import a_kind
from .._tracing import once_differentiable, release
from ..autograd import TO_AUTOGRAD, DelayedScales, LinearBwdArgs
from ..functional import Metadata, replay_of
from ..quantizers import Operand
from ..tensors import (
    QuantizedTensor,
    is_coded,
    plain_gradient,
    prepare_for_saving,
    restore_from_saved,
    saved_tensors,
)
from ..upstream.tensors import is_view_of
from .context import OperationContext, RestoredContext
from .contract import BasicOperationLike, ExtraTensors, FusibleOperation
from .handover import ScaledOperand
from .wiring import Wiring, wrong_count

Placed = tuple[FusibleOperation, tuple[int, ...]]
"""An operation with the positions of its basic operations in the fuser's list."""


@dataclass(frozen=True)
class Fused:
    """The operations that run, by direction; the backward holds only those that have one, in the forward's order."""

    forward: tuple[Placed, ...]
    backward: tuple[Placed, ...]


@dataclass(slots=True)
class Call:
    """One call of a fuser: all that its boundary reads besides differentiable tensors.

    By basic operation: ``num_params``, ``arguments``, the keyword arguments of its methods, ``scales``, its state of
    delayed scaling, ``input_operands``, how it wants its input, and ``grad_operands``, how the previous one wants that
    input's gradient. ``key``: values that determine all; None if operations may do more. ``eager_only``: not in graphs.
    """

    basic_ops: Sequence[BasicOperationLike]
    fused: Fused
    wiring: Wiring
    first_with_backward: int
    input_requires_grad: bool
    num_params: list[int]
    arguments: list[dict[str, Any]]
    scales: list[DelayedScales | None]
    input_operands: Sequence[Operand | None]
    grad_operands: Sequence[Operand | None]
    key: tuple[Any, ...] | None
    eager_only: bool
    observers: dict[int, Any]

    def wanted_output(self, step: int) -> ScaledOperand | None:
        """Return how the operation behind a step of the forward wants the output."""
        at = self.fused.forward[step + 1][1][0]
        operand, scales = self.input_operands[at], self.scales[at]
        if operand is None or scales is None:
            return None if operand is None else ScaledOperand(operand)
        return ScaledOperand(operand, scales.scale, scales.amax)

    def wanted_grad_inputs(
        self, scales_bwd: Sequence[Tensor | None] | None = None
    ) -> list[ScaledOperand | None]:
        """Return for each basic operation how the one in front of it wants the gradient of that operation's input.

        Args:
            scales_bwd: of all basic operations, as casts read them; None in the forward, which casts no gradient.
        """
        wanted: list[ScaledOperand | None] = []
        for index, operand in enumerate(self.grad_operands):
            scales = self.scales[index - 1]
            if operand is None:
                wanted.append(None)
            elif scales is None:
                wanted.append(ScaledOperand(operand))
            else:
                scale = None if scales_bwd is None else scales_bwd[index - 1]
                wanted.append(ScaledOperand(operand, scale, scales.amax))
        return wanted

    def backward_args(self, index: int, stored: LinearBwdArgs) -> LinearBwdArgs:
        """Return what the backward of a linear operation reads, with this call's state."""
        if self.key is None:
            return stored
        own: Any = self.arguments[index]["args"]
        return stored._replace(amax=own.scales.amax, wgrad=own.wgrad)


@dataclass(slots=True, eq=False)
class Kept(Metadata):
    """The result of a forward for its backward, besides tensors, by basic operation.

    ``ranges``: which of the saved tensors are its own. ``objects``: what puts storages together again. Where the call
    has a key, contexts hold no state: they serve other calls, too.
    """

    contexts: list[OperationContext]
    ranges: list[tuple[int, int]]
    objects: list[Any]


def observed_input(
    ops: Sequence[BasicOperationLike], observers: dict[int, Any], where: Sequence[int]
) -> int | None:
    """Return the watched operation whose input an operation of the forward reads first; None without."""
    at = where[0]
    if at > 0 and ops[at - 1]._passes_input:
        return None
    if ops[at]._passes_input:
        at += 1
    return at if at in observers else None


def observed_gradient(
    ops: Sequence[BasicOperationLike], observers: dict[int, Any], where: Sequence[int]
) -> int | None:
    """Return the watched operation whose output's gradient an operation of the backward reads first; None without."""
    at = where[-1]
    if (
        at + 1 < len(ops) and ops[at + 1]._passes_gradient
    ):  # observed there, or summed in the kernel that quantizes
        return None
    while at > 0 and ops[at]._passes_gradient:
        at -= 1
    return at if at in observers else None


def run_forward(ctx: Any, input_: Tensor, call: Call, num_params: int, *tensors: Tensor) -> Any:
    """Run the operations: the output, or a tuple of it and the extra outputs for the caller.

    Args:
        ctx: of the boundary; None if no operation has a backward, so that there is no boundary.
        tensors: parameters of all operations, then the caller's extra inputs.
    """
    forward = _forward
    if call.key is not None:
        linears = []
        for own in call.arguments:
            if "args" in own:
                linears.append(own["args"])
        forward = replay_of(_forward, [input_, *tensors], linears, *call.key)
    x, to_caller, saved, kept = forward(call, input_, num_params, tensors)
    # no view, which operators in place refuse to write to, nor the memory of an input, which is the caller's
    views_input = is_view_of(x, (input_, *tensors[num_params:]))
    if ctx is None:  # a reentrant checkpoint hands on what it gets
        out = x if views_input else x.detach()
        return (out, *to_caller) if to_caller else out
    scales_bwd: list[Tensor | None] = []
    for scales in call.scales:
        scales_bwd.append(None if scales is None else scales.scale)
    ctx.save_for_backward(*scales_bwd, *saved)
    ctx.call, ctx.kept, ctx.replays = call, kept, forward is not _forward
    # for those who look at the node: what the backward of the first linear operation reads
    ctx.backward_objects = None
    for index, context in enumerate(kept.contexts):
        if "backward_args" in vars(context):
            ctx.backward_objects = call.backward_args(index, context.backward_args)
            break
    out = x.clone() if views_input else x.detach()
    return (out, *[tensor.view_as(tensor) for tensor in to_caller]) if to_caller else out


def _forward(
    call: Call, input_: Tensor, num_params: int, tensors: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor | None], Kept]:
    """Return (output, extra outputs for the caller, tensors to save, what else the backward reads)."""
    forward, wiring = call.fused.forward, call.wiring
    contexts: list[OperationContext] = []
    first, extra_inputs = call.first_with_backward, tensors[num_params:]
    for index, (scales, wanted) in enumerate(zip(call.scales, call.wanted_grad_inputs())):
        wants_input = index > first or (index == first and call.input_requires_grad)
        contexts.append(OperationContext(index >= first, wants_input, wanted, scales))
    channels: dict[str, Tensor] = {}
    to_caller: list[Tensor] = []
    anchor = next((t for t in (input_, *tensors) if t.requires_grad), None) if wiring.outlets else None
    x: Any = input_
    for step, (op, where) in enumerate(forward):
        run = slice(where[0], where[-1] + 1)
        own = contexts[run]
        watched = observed_input(call.basic_ops, call.observers, where)
        if watched is not None:
            x = call.observers[watched].observe_input(x, contexts[watched].scales)
        kwargs: dict[str, Any] = {
            "basic_op_extra_inputs": [
                wiring.inputs_of(index, channels, extra_inputs, where) for index in where
            ]
            if wiring.inlets
            else [()] * len(where),
            "prev_op_grad_output_quantizer": own[0].prev_op_grad_output_quantizer,
            "next_op_input_quantizer": call.wanted_output(step) if step + 1 < len(forward) else None,
            "basic_op_kwargs": call.arguments[run],
        }
        if op._use_split_forward:
            kwargs["requires_grad"] = own[-1].requires_grad
            out, extra_outputs, tensors_to_save = op.fuser_forward_compute(x, **kwargs)
            if own[-1].requires_grad:
                op.fuser_forward_save_ctx(own, x, tensors_to_save, **kwargs)
            x = out
        else:
            x, extra_outputs = op.fuser_forward(own, x, **kwargs)
        for index, outputs in zip(where, extra_outputs, strict=True):
            if outputs or wiring.outlets:
                marks = anchor if contexts[index].requires_grad else None
                wiring.distribute(call.basic_ops[index], index, outputs, channels, to_caller, marks)
    if not isinstance(x, Tensor):
        raise RuntimeError(
            f"{type(forward[-1][0]).__name__} returned {a_kind(x)} as the last output; an operation returns a "
            "quantized tensor only where next_op_input_quantizer is not None"
        )
    return (x, to_caller, *_taken_off(contexts, call.key is not None))


def _taken_off(contexts: list[OperationContext], state: bool) -> tuple[list[Tensor | None], Kept]:
    """Take off contexts the tensors to be saved, and ``state``; return the tensors, and the contexts without them."""
    to_save: list[Any] = []
    ranges = []
    for context in contexts:
        begin = len(to_save)
        if context.requires_grad:
            to_save.extend(context.to_save)
        context.to_save = ()
        ranges.append((begin, len(to_save)))
        if state:
            context.scales = context.prev_op_grad_output_quantizer = None
            if "backward_args" in vars(context):
                context.backward_args = context.backward_args._replace(amax=None, wgrad=TO_AUTOGRAD)
    flat, objects = prepare_for_saving(*to_save)
    return flat, Kept(contexts, ranges, objects)


class _OperationsFunction(torch.autograd.Function):
    """Boundary of a list of operations: main input, call, parameters of all operations, extra inputs."""

    forward = staticmethod(run_forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        first, *others = grad_outputs
        grads, saved = [_readable(ctx.call, first), *map(plain_gradient, others)], list(saved_tensors(ctx))
        backward = _replayed_backward(ctx, grads, saved) if ctx.replays else _backward
        return backward(ctx.call, ctx.kept, saved, grads)


def _readable(call: Call, grad: Tensor) -> Tensor:
    """Return the gradient of the output as the last operation reads it, which may take rows in codes."""
    if not isinstance(grad, QuantizedTensor):
        return grad
    takes = getattr(call.fused.backward[-1][0], "_reads_codes", False)
    return grad if takes and is_coded(grad) and not call.observers else plain_gradient(grad)


def _replayed_backward(ctx: Any, grads: Sequence[Tensor], saved: Sequence[Tensor]) -> Any:
    """Return what to call in place of :func:`_backward`; replayed forwards with an equal key share one ``kept``."""
    tensors: list[Tensor | None] = [*grads, *saved]
    values = []
    for arguments in ctx.call.arguments:
        if "args" in arguments:
            scales, wgrad = arguments["args"].scales, arguments["args"].wgrad
            tensors += [scales.amax, wgrad.main_grad]
            values += [wgrad.overwrite, wgrad.dummy]
    return replay_of(_backward, tensors, (), ctx.kept, len(grads), *values)


def _restored(call: Call, kept: Kept, saved: list[Any]) -> list[Any]:
    """Return the operations' contexts with their saved tensors, which are freed with these contexts.

    Args:
        saved: the scales of the backward by operation, then what the operations saved; emptied.
    """
    count, contexts = len(call.scales), []
    scales_bwd = saved[:count]
    tensors = restore_from_saved(kept.objects, saved[count:])
    release(saved)
    wanted = call.wanted_grad_inputs(scales_bwd)
    for index, (context, (begin, end)) in enumerate(zip(kept.contexts, kept.ranges)):
        scales = call.scales[index]
        if scales is not None:
            scales = DelayedScales(scales_bwd[index], scales.amax)
        view: Any = RestoredContext(context, tuple(tensors[begin:end]), wanted[index], scales)
        if call.key is not None and "backward_args" in vars(context):
            view.backward_args = call.backward_args(index, context.backward_args)
        contexts.append(view)
    return contexts


def _backward(
    call: Call, kept: Kept, saved: list[Any], grad_outputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return gradients of the boundary's operands, in their order; empties ``saved``, and frees that on the way."""
    wiring, contexts = call.wiring, _restored(call, kept, saved)
    grad: Any = grad_outputs[0]
    # by (operation, number of the extra output); channels add to what the caller gives
    grad_extra: dict[tuple[int, int], Tensor] = {}
    if len(grad_outputs) > 1:
        for outlet, given in zip([one for one in wiring.outlets if one.to_caller], grad_outputs[1:]):
            grad_extra[outlet.op, outlet.index] = given
    grad_params: list[tuple[Tensor | None, ...]] = []
    for count in call.num_params:
        grad_params.append((None,) * count)
    grad_inputs: list[Tensor | None] = [None] * wiring.from_caller
    for op, where in reversed(call.fused.backward):
        grad_outputs_of: ExtraTensors = [()] * len(where)
        if wiring.outlets:
            grad_outputs_of = [
                tuple([grad_extra.get((index, outlet.index)) for outlet in wiring.outputs_of(index)])
                for index in where
            ]
        watched = observed_gradient(call.basic_ops, call.observers, where)
        if watched is not None:
            grad = call.observers[watched].observe_gradient(grad, contexts[watched].scales)
        grad, params, extra_inputs = op.fuser_backward(
            contexts[where[0] : where[-1] + 1], grad, basic_op_grad_extra_outputs=grad_outputs_of
        )
        for index, own_params, own_inputs in zip(where, params, extra_inputs, strict=True):
            contexts[index] = None
            if len(own_params) != call.num_params[index]:
                raise wrong_count(
                    call.basic_ops[index],
                    "the backward",
                    "gradients of parameters",
                    own_params,
                    call.num_params[index],
                )
            grad_params[index] = tuple(own_params)
            if own_inputs or wiring.inlets:
                wiring.collect(call.basic_ops[index], index, own_inputs, grad_inputs, grad_extra)
    gradients = [grad if call.input_requires_grad else None, None, None]
    for own_params in grad_params:
        gradients += own_params
    return (*gradients, *grad_inputs)
