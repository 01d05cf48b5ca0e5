"""The fuser: runs a list of operations behind one autograd boundary, runs of them replaced by fused operations.

Compilers trace straight through it: what the operations compute is PyTorch's or an operator of this library. Rules of
this file, each paid for with a compiler experiment: nothing outside is written to while tracing; every returned tensor
is a fresh view; no size is put on the context; the stored contexts are never written to by a backward.

State of delayed scaling is read once per forward, here, outside the boundary; the scales of the backward are saved
like any tensor, so that every backward reads those of its forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._checks import flags
from .._tracing import can_remember, in_eager, refuse_in_transform
from ..autograd import DelayedScales
from ..autograd.quantized_boundary import plain_gradient
from ..layers import GroupedLinearLayer, LinearLayer
from ..quantizers import Operand
from ..recipe import Recipe
from ..state import THREAD
from ..tensors import TensorOrQuantized, prepare_for_saving, restore_from_func_ctx
from ..upstream.modules import own_children, own_parameters, own_tables
from ..upstream.tensors import in_transform, is_view_of
from .context import OperationContext, RestoredContext
from .handover import ScaledOperand
from .registry import REGISTRY, FusionFunction
from .wiring import Wiring, wire, wrong_count

if TYPE_CHECKING:
    from .op import BasicOperation, ExtraTensors, FusibleOperation

_Placed = tuple["FusibleOperation", tuple[int, ...]]
"""An operation with the positions of its basic operations in the fuser's list."""


@dataclass(frozen=True)
class Fused:
    """The operations that run, by direction; the backward holds only those that have one, in the forward's order."""

    forward: tuple[_Placed, ...]
    backward: tuple[_Placed, ...]


@dataclass(slots=True)
class _Call:
    """One call of a fuser: all that its boundary reads besides differentiable tensors.

    By basic operation: ``num_params``, ``arguments``, the keyword arguments of its methods, ``scales``, its state of
    delayed scaling, ``input_operands``, how it wants its input, and ``grad_operands``, how the one before it wants
    the gradient of that input. ``observers``: of watched operations, which get plain operands.
    """

    basic_ops: Sequence[BasicOperation]
    fused: Fused
    wiring: Wiring
    first_with_backward: int
    input_requires_grad: bool
    num_params: list[int]
    arguments: list[dict[str, Any]]
    scales: list[DelayedScales | None]
    input_operands: list[Operand | None]
    grad_operands: list[Operand | None]
    eager_only: bool
    observers: dict[int, Any]

    def observed_gradient(self, where: Sequence[int]) -> int | None:
        """Return the watched operation whose output's gradient an operation of the backward reads; None without."""
        return _observed_gradient(self.basic_ops, self.observers, where)

    def wanted_output(self, step: int) -> ScaledOperand | None:
        """Return the quantizer that the operation after a step of the forward requests."""
        at = self.fused.forward[step + 1][1][0]
        operand, scales = self.input_operands[at], self.scales[at]
        if operand is None or scales is None:
            return None if operand is None else ScaledOperand(operand)
        return ScaledOperand(operand, scales.scale_fwd, scales.amax_fwd)

    def wanted_grad_input(
        self, index: int, operand: Operand, scales_bwd: Sequence[Tensor | None] | None = None
    ) -> ScaledOperand:
        """Return the quantizer that the operation before a basic one requests for that one's input gradient.

        Args:
            operand: of :attr:`grad_operands`.
            scales_bwd: of all basic operations, as they were saved; None in the forward.
        """
        scales = self.scales[index - 1]
        if scales is None:
            return ScaledOperand(operand)
        scale = scales.scale_bwd if scales_bwd is None else scales_bwd[index - 1]
        return ScaledOperand(operand, scale, scales.amax_bwd)


def _forward(ctx: Any, input_: Tensor, call: _Call, num_params: int, *tensors: Tensor) -> Any:
    """Run the operations: the output, or a tuple of it and the extra outputs for the caller.

    Args:
        ctx: of the boundary; None if no operation has a backward, so that there is no boundary.
        tensors: parameters of all operations, then the caller's extra inputs.
    """
    forward, wiring = call.fused.forward, call.wiring
    contexts: list[OperationContext] = []
    first, extra_inputs = call.first_with_backward, tensors[num_params:]
    for index, operand in enumerate(call.grad_operands):
        wants_input = index > first or (index == first and call.input_requires_grad)
        wanted = None if operand is None else call.wanted_grad_input(index, operand)
        contexts.append(OperationContext(index >= first, wants_input, wanted, call.scales[index]))
    channels: dict[str, Tensor] = {}
    to_caller: list[Tensor] = []
    anchor = next((t for t in (input_, *tensors) if t.requires_grad), None) if wiring.outlets else None
    x: Any = input_
    for step, (op, where) in enumerate(forward):
        run = slice(where[0], where[-1] + 1)
        own = contexts[run]
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
        if where[0] in call.observers:
            x = call.observers[where[0]].observe_input(x, own[0].scales)
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
            f"{type(forward[-1][0]).__name__} returned a {type(x).__name__} as the last output; an operation returns a "
            "quantized tensor only where next_op_input_quantizer is not None"
        )
    if torch.compiler.is_compiling():
        x = _after_scales(x, call, ctx is not None)
    if ctx is None:
        return (x, *to_caller) if to_caller else x
    _save(ctx, call, contexts)
    # no view, which operators in place refuse to write to; but of an input's memory one, that they do refuse
    out = x.view_as(x) if is_view_of(x, (input_, *extra_inputs)) else x.detach()
    return (out, *[tensor.view_as(tensor) for tensor in to_caller]) if to_caller else out


def _after_scales(x: Tensor, call: _Call, recorded: bool) -> Tensor:
    """Return ``x``, available in a graph only once the scales of its operations were read.

    The partitioner moves what only the backward reads there, after renewals in between. A linear layer reads scales in
    its forward as well; ``Quantize(forward=False)`` and operations of users may not. A graph that records no gradients
    may be the first run of a reentrant checkpoint, whose recomputation reads the scales that this one has read.
    """
    for op, scales in zip(call.basic_ops, call.scales):
        in_forward = isinstance(op, (LinearLayer, GroupedLinearLayer))
        reads = not in_forward and (recorded or op.training)
        if reads and scales is not None and scales.scale_bwd is not None:
            x = torch.where(scales.scale_bwd.sum().isnan(), x, x)
    return x


class _OperationsFunction(torch.autograd.Function):
    """Boundary of :class:`OperationFuser`: main input, call, parameters of all operations, extra inputs."""

    forward = staticmethod(_forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return _run_backward(ctx.call, _restored(ctx), [plain_gradient(grad) for grad in grad_outputs])


def _save(ctx: Any, call: _Call, contexts: list[OperationContext]) -> None:
    """Keep what the operations save, after the gradients' scales of delayed scaling."""
    tensors_to_save: list[TensorOrQuantized | None] = []
    for scales in call.scales:
        tensors_to_save.append(None if scales is None else scales.scale_bwd)
    ranges = []
    for context in contexts:
        begin = len(tensors_to_save)
        if context.requires_grad:
            tensors_to_save.extend(context.to_save)
        context.to_save = ()
        ranges.append((begin, len(tensors_to_save)))
    flat, objects = prepare_for_saving(*tensors_to_save)
    ctx.save_for_backward(*flat)
    ctx.tensor_objects = objects
    ctx.call, ctx.contexts, ctx.ranges = call, contexts, ranges
    # for those who look at the node: what the backward of the first linear operation reads
    ctx.backward_objects = None
    for context in contexts:
        if "backward_args" in vars(context):
            ctx.backward_objects = context.backward_args
            break


def _restored(ctx: Any) -> list[Any]:
    """Return the operations' contexts with their saved tensors, which are freed with these contexts."""
    saved: list[Any] = restore_from_func_ctx(ctx)
    call: _Call = ctx.call
    scales_bwd, contexts = saved[: len(call.scales)], []
    for index, (context, (begin, end)) in enumerate(zip(ctx.contexts, ctx.ranges)):
        scales = call.scales[index]
        if scales is not None:
            scales = DelayedScales(None, None, scales_bwd[index], scales.amax_bwd)
        operand = call.grad_operands[index]
        wanted = None if operand is None else call.wanted_grad_input(index, operand, scales_bwd)
        contexts.append(RestoredContext(context, tuple(saved[begin:end]), wanted, scales))
    return contexts


def _run_backward(
    call: _Call, contexts: list[Any], grad_outputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return gradients of the boundary's operands, in their order; empties ``contexts`` on the way."""
    wiring = call.wiring
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
        watched = call.observed_gradient(where)
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


def _refuse_computed_parameters(op: BasicOperation) -> None:
    """Refuse what PyTorch puts in the place of a parameter: an operation's gradients go to parameters as they are."""
    computed: list[str] = list(own_children(op).get("parametrizations") or ())  # type: ignore[arg-type]
    for name, value in vars(op).items():  # as pruning does it, and the older norms of weights
        if isinstance(value, Tensor) and any(name + end in own_parameters(op) for end in ("_orig", "_v")):
            computed.append(name)
    if computed:
        raise RuntimeError(
            f"{computed[0]!r} of this {type(op).__name__} is computed from other parameters (parametrize, prune, "
            "weight_norm, spectral_norm), whose gradients an operation cannot give; use the module of that name "
            "in narrowcast.nn"
        )


class OperationFuser:
    """Runs consecutive operations; registered fused operations replace runs of them, per direction.

    It fuses at the first call and again when the recipe's value, the registered fusions, the first operation with a
    backward, or the parameters' dtypes change; compiled code fuses when tracing.

    Args:
        ops: operations; fused ones are replaced by their parts first.
        capture: fix the operations' channels.
        incoming: channels that the caller feeds; they count as extra inputs.
        outgoing: channels that the caller reads; they count as extra outputs.
    Raises:
        ValueError: no operations, or a channel has no or two sources.
    """

    def __init__(
        self,
        ops: Sequence[FusibleOperation],
        *,
        capture: bool = True,
        incoming: Collection[str] = (),
        outgoing: Collection[str] = (),
    ) -> None:
        if not isinstance(ops, Sequence) or not all(hasattr(op, "is_fused_op") for op in ops):
            raise TypeError(f"ops is {ops!r}, of type {type(ops).__name__}; pass a list of operations")
        flags(capture=capture)
        self.basic_ops = tuple(taken_apart(ops))
        if not self.basic_ops:
            raise ValueError("a fuser got no operations; give it at least one")
        self.wiring = wiring = wire(self.basic_ops, incoming, outgoing)
        # for each extra input, the channel that the caller feeds with it; None for one of the user's
        self.extra_input_channels = [inlet.channel for inlet in wiring.inlets if inlet.position >= 0]
        # for each extra output, its channel if it has one, and whether the user gets it
        self.extra_outputs = [(out.channel, out.to_user) for out in wiring.outlets if out.to_caller]
        self._quantizing = [
            index
            for index, op in enumerate(self.basic_ops)
            if op.num_quantizers("forward") or op.num_quantizers("backward")
        ]
        self._preparing = [(op, at) for at, op in enumerate(self.basic_ops) if op._prepares_forward]
        self._last_fused: tuple[Any, Fused] = None, Fused((), ())
        self._ran = False
        if capture and can_remember():
            for op in self.basic_ops:
                op._captured = True

    @property
    def _forward_ops(self) -> list[_Placed]:
        """The operations of the last forward, with the positions of the basic ones; Transformer Engine's name."""
        return list(self._last_fused[1].forward)

    @property
    def _backward_ops(self) -> list[_Placed]:
        """The operations of the last backward, in its order."""
        return list(reversed(self._last_fused[1].backward))

    def __call__(
        self,
        input_: Any,
        *extra_inputs: Tensor,
        basic_op_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> Any:
        """Run the operations.

        Args:
            input_: main input of the first one.
            extra_inputs: those of all operations that no channel feeds, in order.
            basic_op_kwargs: keyword arguments, one dict per basic operation.
        Returns:
            the output of the last one; with extra outputs a tuple of it and them.
        Raises:
            ValueError: another number of extra inputs or of keyword dicts.
            TypeError: an input that is no tensor.
            RuntimeError: a fusion lost operations, or PyTorch computes a parameter of one from others.
        """
        self._check_arguments(input_, extra_inputs, basic_op_kwargs)
        compiling = torch.compiler.is_compiling()
        if in_transform():
            refuse_in_transform("a list of operations")
        if compiling:
            _make_features_static(input_)
        elif not self._ran and input_.device.type != "meta":
            for op in self.basic_ops:
                op.pre_first_fuser_forward()  # may make parameters
            self._ran = True
        params: list[list[Tensor]] = []
        operands = [input_]
        for op in self.basic_ops:
            own_params, children, hooks = own_tables(op)
            if children or hooks:
                _refuse_computed_parameters(op)
            whole = len(own_params) == len(op._registered)
            params.append(list(op.parameters()) if whole else op._views_of_parameters())
            operands += params[-1]
        first = 0
        if not (input_.requires_grad and torch.is_grad_enabled()):
            first = self._first_with_backward(extra_inputs, params)
        for op, at in self._preparing:
            op.pre_fuser_forward(requires_grad=at >= first)
        call = self._call(first, input_, params, basic_op_kwargs)
        operands += extra_inputs
        has_backward = first < len(self.basic_ops)
        if has_backward and compiling:
            operands = _each_once(operands)
        run: Any = _OperationsFunction.apply
        of_run: list[Any] = [operands[0], call, len(operands) - 1 - len(extra_inputs), *operands[1:]]
        if not has_backward:
            run, of_run = _forward, [None, *of_run]
        return in_eager(run, *of_run) if call.eager_only else run(*of_run)

    def _call(
        self,
        first: int,
        input_: Tensor,
        params: Sequence[Sequence[Tensor]],
        basic_op_kwargs: Sequence[dict[str, Any]] | None,
    ) -> _Call:
        """Return the record of one call, made here, under the caller's recipe and grad mode."""
        ops, fused = self.basic_ops, self._fused_for(self.recipe_in_force(), first, params)
        input_requires_grad = torch.is_grad_enabled() and input_.requires_grad
        arguments = list(basic_op_kwargs) if basic_op_kwargs else [{}] * len(ops)
        scales: list[DelayedScales | None] = [None] * len(ops)
        eager_only = False
        observers: dict[int, Any] = {}
        for index in self._quantizing:
            if ops[index]._watcher is not None and ops[index]._watcher.sampling:
                observers[index] = ops[index]._watcher.observer(ops[index])
            wants_input = index > first or (index == first and input_requires_grad)
            own = ops[index].forward_arguments(index >= first, wants_input)
            if own:
                arguments[index] = {**arguments[index], **own}
                scales[index] = own.get("scales")
                if "plan" in own and own["plan"].eager_only:
                    eager_only = True
        input_operands: list[Operand | None] = [None] * len(ops)
        for op, where in fused.forward[1:]:
            if where[0] not in observers:
                input_operands[where[0]] = op.get_input_quantizer()
        grad_operands: list[Operand | None] = [None] * len(ops)
        for op, where in fused.backward[:-1]:
            # a bias in front is summed in the kernel that quantizes, in another order than by itself
            sums = ops[where[-1] + 1]._passes_gradient
            if observers and not sums and _observed_gradient(ops, observers, where) is not None:
                continue
            grad_operands[where[-1] + 1] = op.get_grad_output_quantizer()
        return _Call(
            ops,
            fused,
            self.wiring,
            first,
            input_requires_grad,
            list(map(len, params)),
            arguments,
            scales,
            input_operands,
            grad_operands,
            eager_only,
            observers,
        )

    def recipe_in_force(self) -> Recipe | None:
        """Return the autocast's recipe, else the own one of all operations with quantizers; None if they differ."""
        state = THREAD.state
        if state.depth or not self._quantizing:
            return state.recipe
        recipe = self.basic_ops[self._quantizing[0]]._recipe_in_force()
        for index in self._quantizing[1:]:
            if self.basic_ops[index]._recipe_in_force() != recipe:
                return None
        return recipe

    def fused(self, recipe: Recipe | None, first_with_backward: int = 0) -> Fused:
        """Return the fused operations under a recipe if those from ``first_with_backward`` on have a backward.

        The registered fusions run: those of both directions, then those of the forward, then those of the backward.

        Raises:
            RuntimeError: a fusion's result is not made of exactly the basic operations, in order.
        """
        joint = _apply(REGISTRY.joint, list(self.basic_ops), recipe)
        forward = _apply(REGISTRY.forward, list(joint), recipe)
        with_backward = [op for op, where in _placed(joint, 0) if where[-1] >= first_with_backward]
        skipped = len(self.basic_ops) - len(taken_apart(with_backward))
        backward = _apply(REGISTRY.backward, with_backward, recipe)
        return Fused(_placed(forward, 0), _placed(backward, skipped))

    def _fused_for(
        self, recipe: Recipe | None, first_with_backward: int, params: Sequence[Sequence[Tensor]]
    ) -> Fused:
        """Return :meth:`fused`, cached for the next call; traced code must not write the cache."""
        if torch.compiler.is_compiling():
            return self.fused(recipe, first_with_backward)
        dtypes = []
        for own in params:
            for param in own:
                dtypes.append(param.dtype)
        key = (recipe, REGISTRY.version, first_with_backward, dtypes)
        kept, fused = self._last_fused  # read at once: another thread may run under another recipe
        if kept != key:
            fused = self.fused(recipe, first_with_backward)
            self._last_fused = key, fused
        return fused

    def _check_arguments(
        self, input_: Any, extra_inputs: Sequence[Tensor], basic_op_kwargs: Sequence[dict[str, Any]] | None
    ) -> None:
        wanted = self.wiring.from_caller
        if len(extra_inputs) != wanted:
            raise ValueError(f"got {len(extra_inputs)} extra inputs, the operations take {wanted}")
        for position, given in enumerate((input_, *extra_inputs)):
            if not isinstance(given, Tensor):
                which = f"extra input {position - 1}" if position else "the input"
                raise TypeError(f"{which} is a {type(given).__name__}; pass a tensor")
        if basic_op_kwargs is not None and len(basic_op_kwargs) != len(self.basic_ops):
            raise ValueError(
                f"basic_op_kwargs has {len(basic_op_kwargs)} entries; give one dict for each of the "
                f"{len(self.basic_ops)} basic operations"
            )

    def _first_with_backward(self, extra_inputs: Sequence[Tensor], params: Sequence[Sequence[Tensor]]) -> int:
        """Return the position of the first operation with a backward, if the input has none; after the last one
        without.
        """
        if not torch.is_grad_enabled():
            return len(self.basic_ops)
        wanting = [inlet.op for inlet in self.wiring.inlets if inlet.position >= 0]
        wanting = [op for op, extra in zip(wanting, extra_inputs) if extra.requires_grad]
        for index, own in enumerate(params):
            if index in wanting or any(param.requires_grad for param in own):
                return index
        return len(self.basic_ops)


def _observed_gradient(
    ops: Sequence[BasicOperation], observers: dict[int, Any], where: Sequence[int]
) -> int | None:
    at = where[-1]
    while at > where[0] and ops[at]._passes_gradient:
        at -= 1
    return at if at in observers else None


def _make_features_static(tensor: Tensor) -> None:
    """Make the last dim a constant for the compiler; the others may stay symbolic.

    An operation compares the features of what it gets with its own. Behind the boundary that would turn a symbol, which
    PyTorch 2.11 counts among the results there, into a number, and end in an assertion of the compiler.
    """
    if tensor.dim():
        int(tensor.shape[-1]).bit_length()  # any method of a plain int


def _each_once(operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the same tensors, every further occurrence of one as a view of it.

    The compiler refuses an operand that is given twice, as in a residual connection around the whole list; in PyTorch
    2.11 its gradients are silently wrong.
    """
    seen: dict[Tensor, None] = {}
    once: list[Tensor] = []
    for operand in operands:
        once.append(operand.view_as(operand) if operand in seen else operand)
        seen[operand] = None
    return once


def _apply(
    functions: Sequence[FusionFunction], ops: list[FusibleOperation], recipe: Recipe | None
) -> list[FusibleOperation]:
    basic_ops = taken_apart(ops)
    for function in functions:
        ops = list(function(ops, recipe=recipe))
        covered = taken_apart(ops)
        if len(covered) != len(basic_ops) or any(a is not b for a, b in zip(covered, basic_ops)):
            raise RuntimeError(
                f"the fusion {_name_of(function)} returned operations that run "
                f"{[type(op).__name__ for op in covered]}, the list is {[type(op).__name__ for op in basic_ops]}; a "
                "fusion must cover every basic operation once, in order"
            )
    return ops


def inner_channel(ops: Sequence[Any]) -> str | None:
    """Return the name of a channel between two of these basic operations; None without."""
    given = [channel for op in ops for channel in op._output_channels.values()]
    for op in ops:
        for channel in op._input_channels.values():
            if channel in given:
                return channel
    return None


def taken_apart(ops: Sequence[Any]) -> list[BasicOperation]:
    """Return the basic operations that these run."""
    return [basic for op in ops for basic in (op.basic_ops if op.is_fused_op else (op,))]


def _name_of(function: Any) -> str:
    return getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)


def _placed(ops: Sequence[FusibleOperation], begin: int) -> tuple[_Placed, ...]:
    placed: list[_Placed] = []
    for op in ops:
        end = begin + len(taken_apart([op]))
        placed.append((op, tuple(range(begin, end))))
        begin = end
    return tuple(placed)
