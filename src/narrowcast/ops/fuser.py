"""The fuser: a list of operations behind one autograd boundary, runs of them replaced by fused operations.

All that a call reads of the caller's recipe, of the grad mode and of the operations' state is asked for here, once and
outside of the boundary (:mod:`.boundary`), which gets it as a value.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import flags, shown, tensor, typed
from .._tracing import can_remember, in_eager, refuse_in_transform
from ..autograd import DelayedScales
from ..layers import not_for_jit
from ..quantizers import Operand
from ..recipe import Recipe
from ..state import THREAD
from ..upstream.autograd import forward_level, graph_task_id
from ..upstream.modules import own_children, own_parameters, own_tables
from ..upstream.tensors import in_transform
from .boundary import Call, Fused, Placed, _OperationsFunction, observed_gradient, observed_input, run_forward
from .contract import FusibleOperation
from .registry import REGISTRY, FusionFunction
from .wiring import wire

_DTYPE = operator.attrgetter("dtype")


def _refuse_computed_parameters(op: nn.Module) -> None:
    """Refuse what PyTorch puts in the place of a parameter: an operation's gradients go to parameters as they are."""
    computed: list[str] = list(own_children(op).get("parametrizations") or ())  # type: ignore[arg-type]
    for name, value in vars(op).items():  # as pruning does it, and the older norms of weights
        if isinstance(value, Tensor) and any(name + end in own_parameters(op) for end in ("_orig", "_v")):
            computed.append(name)
    if computed:
        raise RuntimeError(
            f"{shown(computed[0])} of this {type(op).__name__} is computed from other parameters (parametrize, prune, "
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
            raise TypeError(f"ops is {typed(ops)}; pass a list of operations")
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
        self._last_fused: tuple[Any, Fused, Any, Any] = None, Fused((), ()), None, None
        self._ran = False
        if capture and can_remember():
            for op in self.basic_ops:
                op._captured = True

    @property
    def _forward_ops(self) -> list[Placed]:
        """The operations of the last forward, with the positions of the basic ones; Transformer Engine's name."""
        return list(self._last_fused[1].forward)

    @property
    def _backward_ops(self) -> list[Placed]:
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
            NotImplementedError: inside ``torch.jit.trace``.
        """
        self._check_arguments(input_, extra_inputs, basic_op_kwargs)
        compiling = torch.compiler.is_compiling()
        if in_transform():
            refuse_in_transform("a list of operations")
        if compiling:
            _make_features_static(input_)
        elif torch.jit.is_tracing():
            raise not_for_jit("trace", self.basic_ops[0])
        elif not self._ran and input_.device.type != "meta":
            for op in self.basic_ops:
                op.pre_first_fuser_forward()  # may make parameters
            self._ran = True
        params: list[Sequence[Tensor]] = []
        operands = [input_]
        for op, (own_params, children, hooks) in zip(self.basic_ops, own_tables(self.basic_ops)):
            if children or hooks:
                _refuse_computed_parameters(op)
            if len(own_params) != len(op._registered):
                own = op._views_of_parameters()
            elif op._values is None:
                own = list(op.parameters())
            else:  # no children
                own = []
                for param in own_params.values():
                    if param is not None:
                        own.append(param)
            params.append(own)
            operands += own
        first = 0
        if not (input_.requires_grad and torch.is_grad_enabled()):
            first = self._first_with_backward(extra_inputs, params)
        for op, at in self._preparing:
            op.pre_fuser_forward(requires_grad=at >= first)
        call = self._call(first, input_, params, basic_op_kwargs, compiling)
        operands += extra_inputs
        # the boundary is what refuses tangents: the way without it would drop them
        has_backward = first < len(self.basic_ops) or (not compiling and forward_level() >= 0)
        if has_backward and compiling:
            operands = _each_once(operands)
        run: Any = _OperationsFunction.apply
        of_run: list[Any] = [operands[0], call, len(operands) - 1 - len(extra_inputs), *operands[1:]]
        if not has_backward:
            run, of_run = run_forward, [None, *of_run]
        return in_eager(run, *of_run) if call.eager_only else run(*of_run)

    def _call(
        self,
        first: int,
        input_: Tensor,
        params: Sequence[Sequence[Tensor]],
        basic_op_kwargs: Sequence[dict[str, Any]] | None,
        compiling: bool,
    ) -> Call:
        """Return the record of one call, made here, under the caller's recipe and grad mode."""
        ops, input_requires_grad = self.basic_ops, torch.is_grad_enabled() and input_.requires_grad
        arguments = list(basic_op_kwargs) if basic_op_kwargs else [{}] * len(ops)
        scales: list[DelayedScales | None] = [None] * len(ops)
        plans: list[Any] = []
        eager_only = False
        observers: dict[int, Any] = {}
        for index in self._quantizing:
            wants_input = index > first or (index == first and input_requires_grad)
            own = ops[index].forward_arguments(index >= first, wants_input)
            # after the state was made: a trace that has read buffers once does not see later ones
            if ops[index]._watcher is not None and ops[index]._watcher.sampling:
                observers[index] = ops[index]._watcher.observer(ops[index])
            if own:
                arguments[index] = {**arguments[index], **own}
                scales[index] = own.get("scales")
                plan: Any = own["args"].plan if "args" in own else own.get("plan")
                plans.append(plan)
                eager_only |= plan is not None and bool(plan.eager_only)
        fused, operands, key = self._fused_for(
            self.recipe_in_force(compiling), first, params, plans, compiling
        )
        if observers:  # they look at plain operands, each time
            operands, key = self._operands(fused, observers), None
        if key is not None and basic_op_kwargs:
            key = None
        elif key is not None:
            values: list[Any] = []
            for op in ops:
                values.append(op._values(op))  # type: ignore[misc]
            key = (*key, first, input_requires_grad, *values)
        counts, wiring = list(map(len, params)), self.wiring
        return Call(
            ops,
            fused,
            wiring,
            first,
            input_requires_grad,
            counts,
            arguments,
            scales,
            *operands,
            key,
            eager_only,
            observers,
        )

    def recipe_in_force(self, compiling: bool) -> Recipe | None:
        """Return the autocast's recipe, else the own one of all operations with quantizers; None if they differ."""
        state = THREAD.state
        recomputes = not compiling and graph_task_id() != -1  # whose recipe may be another than that in force
        if not self._quantizing or (state.depth and not recomputes):
            return state.recipe
        recipes = []
        for index in self._quantizing:
            op = self.basic_ops[index]
            recipes.append(op._recipe_in_force() if recomputes else op._recipe)
        return recipes[0] if recipes.count(recipes[0]) == len(recipes) else None

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
        self,
        recipe: Recipe | None,
        first_with_backward: int,
        params: Sequence[Sequence[Tensor]],
        plans: Sequence[Any],
        compiling: bool,
    ) -> tuple[Fused, tuple[list[Any], list[Any]], Any]:
        """Return :meth:`fused`, its :meth:`_operands`, and its part of the key; None where there is a user's operation.

        Kept for the next call; but not by traced code, which must not write here.
        """
        if compiling:
            fused = self.fused(recipe, first_with_backward)
            return fused, self._operands(fused, {}), None
        dtypes = list(map(_DTYPE, itertools.chain(*params)))
        known = (recipe, REGISTRY.version, first_with_backward, dtypes, plans)
        kept, fused, operands, key = self._last_fused  # at once: another thread may run under another recipe
        if kept != known:
            fused = self.fused(recipe, first_with_backward)
            operands, key = self._operands(fused, {}), None
            ran = (*fused.forward, *fused.backward)
            if all(op._values is not None for op, _ in ran):
                key = (tuple([(type(op), where) for op, where in ran]), len(fused.forward), self.wiring)
            self._last_fused = known, fused, operands, key
        elif key is None:
            operands = self._operands(fused, {})  # a user's operation may answer as it likes
        return fused, operands, key

    def _operands(self, fused: Fused, observers: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """Return by basic operation how it wants its input, and the one in front of it that input's gradient."""
        inputs: list[Operand | None] = [None] * len(self.basic_ops)
        grads = list(inputs)
        for op, where in fused.forward[1:]:
            if observed_input(self.basic_ops, observers, where) != where[0]:
                inputs[where[0]] = op.get_input_quantizer()
        for op, where in fused.backward[:-1]:
            if observed_gradient(self.basic_ops, observers, where) is None:
                grads[where[-1] + 1] = op.get_grad_output_quantizer()
        return inputs, grads

    def _check_arguments(
        self, input_: Any, extra_inputs: Sequence[Tensor], basic_op_kwargs: Sequence[dict[str, Any]] | None
    ) -> None:
        wanted = self.wiring.from_caller
        if len(extra_inputs) != wanted:
            raise ValueError(f"got {len(extra_inputs)} extra inputs, the operations take {wanted}")
        for position, given in enumerate((input_, *extra_inputs)):
            tensor(f"extra input {position - 1}" if position else "the input", given)
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


def taken_apart(ops: Sequence[Any]) -> list[Any]:
    """Return the basic operations that these run."""
    return [basic for op in ops for basic in op.basic_ops]


def _name_of(function: Any) -> str:
    return getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)


def _placed(ops: Sequence[FusibleOperation], begin: int) -> tuple[Placed, ...]:
    placed: list[Placed] = []
    for op in ops:
        end = begin + len(taken_apart([op]))
        placed.append((op, tuple(range(begin, end))))
        begin = end
    return tuple(placed)
