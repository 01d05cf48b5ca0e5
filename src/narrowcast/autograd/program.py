"""A layer as a program of stages: one interpreter, forwards and backwards, in one autograd function.

    forward    from the first stage to the last; a stage hands its result over as the next GEMM reads it
    backward   from the last to the first; a stage hands its gradient over as the GEMM before it reads that

A stage is a record that names its tensors by their place among those of the call, of which 0 is the input; it holds no
tensor and no setting. What it reads besides its tensors comes with every call, so that nothing here goes out of date.
Where a program recomputes, only its tensors are saved, and the backward runs the forward once more but for its last
GEMM: from the same scales, and collecting no amax. The rules of :mod:`.gemms` hold here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._tracing import after, give_key, once_differentiable, record, slice_of
from ..functional import (
    act,
    act_backward,
    act_backward_quantize,
    act_quantize,
    draw_seed,
    norm,
    norm_quantize,
    replay_of,
)
from ..quantizers import OperandBuffers, Quantizer, buffers_of
from ..recipe import LinearPlan
from ..tensors import QuantizedTensorStorage
from .activation import ActivationSettings
from .arguments import TO_AUTOGRAD, DelayedScales, LinearBwdArgs, LinearFwdArgs
from .gemms import (
    SavedOperand,
    fprop,
    fprop_of_few_rows,
    has_few_rows,
    linear_backward,
    linear_bwd_args,
    quantized_gradients,
    saved_operand,
    split_operand,
    weight_operand,
    with_saved,
)
from .linear import saved_tensors
from .norm import NormSettings, norm_gradients
from .saved_activation import decoded, kept_in_codes
from .weight_gradient import begin_main_grads_


class Value(NamedTuple):
    """The output of a stage: in high precision, quantized for the next GEMM, or both.

    ``lead``: its leading dims, ``rows`` in all; one of them may be -1.
    """

    plain: Tensor | None
    operand: OperandBuffers | None
    lead: Sequence[int]
    rows: int


class Grad(NamedTuple):
    """The gradient of a value: in high precision, or quantized (``rows``, N), with what it sums up to for the bias."""

    plain: Tensor | None
    operand: OperandBuffers | None = None
    sums: Tensor | None = None
    rows: int = 0


class NormArgs(NamedTuple):
    """The inputs of a norm besides its tensors. ``returns_input``: the normalized input, maybe a sum, is returned."""

    settings: NormSettings
    returns_output: bool
    returns_input: bool


@dataclass(frozen=True)
class Norm:
    """A norm, of the sum with a residual where that is not None, as the input of the linear layer after it.

    It quantizes its output itself: that exists in high precision only where it is returned, read by the backward, or
    gathered from several processes in such. Returned beside the program's output, where its arguments say so: the
    norm's output, then what was normalized.
    """

    weight: int
    bias: int
    residual: int | None = None

    def forward(
        self,
        value: Value,
        tensors: Sequence[Any],
        args: NormArgs,
        behind: LinearFwdArgs,
        beside: list[Tensor],
    ) -> tuple[Value, list[SavedOperand]]:
        """Return the output and the backward's data."""
        inp: Any = value.plain
        plan, scale, amax = behind.plan, behind.scales.scale, behind.scales.amax
        weight, bias, residual, settings = tensors[self.weight], tensors[self.bias], None, args.settings
        x = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
        if self.residual is not None and tensors[self.residual] is not None:
            residual = tensors[self.residual].reshape(x.shape)
        how = (x, residual, weight, bias, settings.eps, settings.normalization, settings.zero_centered_gamma)
        keeps, parallel, joins = args.returns_output, behind.parallel, False
        if parallel is not None and parallel.gathers_input:
            joins = parallel.joins(plan.input, x.shape[0])
            keeps |= not joins or plan.input.shared is not None or plan.backward_override == "high_precision"
        else:
            parallel = None
            keeps |= plan.needs_weight and plan.backward_override == "high_precision"
        operand: OperandBuffers | None = None
        output: Any = None
        few = plan.few_rows and has_few_rows(behind, x.shape[0])
        if keeps or few:
            output, mean, rstd, summed = norm(*how)
            if few:
                pass  # the GEMM quantizes it
            elif parallel is None:
                operand = plan.input.quantize(output, scale, amax)
            elif joins:
                operand = parallel.share(output, plan.input, plan.input.seed(output), scale, amax)
        else:
            scale = scale if parallel is None else parallel.shared_scale(plan.input, scale)
            seed = draw_seed(x) if plan.input.stochastic else None
            *buffers, mean, rstd, summed = norm_quantize(*how, plan.input.quantizer, seed, scale, amax)
            operand = plan.input.split(buffers)
        if residual is not None:
            inp = summed.view(inp.shape)
        if args.returns_output:
            beside.append(output.view(inp.shape))
        if args.returns_input:
            beside.append(inp)
        saved: list[Any] = [None, None, None, None]
        if plan.needs_input:
            saved = [*(kept_in_codes(inp) if plan.saves_codes else (inp,)), weight, mean, rstd]
        return record(Value, (output, operand, value.lead, x.shape[0])), [record(SavedOperand, (saved, None))]

    def backward(
        self,
        flow: list[Grad],
        saved: list[Any],
        args: NormArgs,
        front: Any,
        scale: Tensor | None,
        grads: list[Tensor | None],
        beside: list[Tensor],
    ) -> None:
        """Put the gradient of its input into ``flow``, those of its other tensors into ``grads``."""
        grad: Any = flow.pop().plain
        weight, mean, rstd = _pop_last(saved, 3)
        inp = saved.pop()
        if inp.dtype == torch.uint8:
            inp = decoded(inp, saved.pop(), grad.dtype)
        grad_input = beside.pop() if args.returns_input else None
        if args.returns_output:
            grad = grad + beside.pop().reshape(grad.shape)
        dx, dweight, dbias = norm_gradients(grad, inp, weight, mean, rstd, args.settings, grad_input)
        grads[self.weight], grads[self.bias] = dweight, dbias
        if self.residual is not None and args.returns_input:
            grads[self.residual] = dx
        flow.append(record(Grad, (dx, None, None, 0)))


@dataclass(frozen=True)
class Activation:
    """An activation between two linear layers."""

    def forward(
        self,
        value: Value,
        tensors: Sequence[Any],
        args: ActivationSettings,
        behind: LinearFwdArgs,
        beside: list[Tensor],
    ) -> tuple[Value, list[SavedOperand]]:
        """Return the output and the backward's data."""
        hidden: Any = value.plain
        plan, scales, name, parameters = behind.plan, behind.scales, args.activation, list(args.parameters)
        kept: list[Any] = [hidden if plan.needs_input else None]
        if plan.needs_input and plan.saves_codes:
            kept = kept_in_codes(hidden)
        saved = [record(SavedOperand, (kept, None))]
        if plan.few_rows and has_few_rows(behind, value.rows):
            return value._replace(plain=act(hidden, name, parameters)), saved
        if plan.needs_weight and plan.backward_override == "high_precision":
            output = act(hidden, name, parameters)
            operand = plan.input.quantize(output, scales.scale, scales.amax)
            return value._replace(plain=output, operand=operand), saved
        seed = draw_seed(hidden) if plan.input.stochastic else None
        buffers = act_quantize(
            hidden, name, plan.input.quantizer, parameters, seed, scales.scale, scales.amax
        )
        return record(Value, (None, plan.input.split(buffers), value.lead, value.rows)), saved

    def backward(
        self,
        flow: list[Grad],
        saved: list[Any],
        args: ActivationSettings,
        front: LinearBwdArgs,
        scale: Tensor | None,
        grads: list[Tensor | None],
        beside: list[Tensor],
    ) -> None:
        """Put what the linear layer before it reads into ``flow``; ``scale``: of that layer."""
        grad: Any = flow.pop().plain
        hidden, plan, sums = saved.pop(), front.plan, None
        if hidden.dtype == torch.uint8:
            hidden = decoded(hidden, saved.pop(), grad.dtype)
        name, parameters = args.activation, list(args.parameters)
        if plan.backward_override is not None or not (plan.needs_input or plan.needs_weight):
            flow.append(Grad(act_backward(grad, hidden, name, parameters)))
            return
        operand = plan.grad_output
        buffers = act_backward_quantize(
            grad,
            hidden,
            name,
            operand.quantizer,
            parameters,
            front.needs_bias,
            draw_seed(grad) if operand.stochastic else None,
            scale,
            front.amax,
        )
        if front.needs_bias:
            *buffers, sums = buffers
        flow.append(record(Grad, (None, operand.split(buffers), sums, grad.shape[0])))


@dataclass(frozen=True)
class Linear:
    """A linear layer whose input comes quantized, or is gathered from several processes.

    ``features``: rows of its weight, where that is not among the tensors: its buffers serve in a recomputation.
    """

    weight: int
    bias: int
    features: int | None = None

    def operands(
        self, value: Value, tensors: Sequence[Any], args: LinearFwdArgs
    ) -> tuple[OperandBuffers, OperandBuffers, int, list[SavedOperand]]:
        """Return the input and weight as fprop reads them, how many rows it reads, and what the backward reads."""
        plan, operand, rows = args.plan, value.operand, value.rows
        w, saved_weight = weight_operand(tensors[self.weight], args)
        if args.parallel is None:
            saved_input = saved_operand(operand, value.plain, plan.needs_weight, plan.backward_override)  # type: ignore[arg-type]
        else:
            operand, saved_input, rows = split_operand(args, args.parallel, operand, value.plain, rows)
        return operand, w, rows, [saved_input, saved_weight]  # type: ignore[return-value]

    def forward(
        self,
        value: Value,
        tensors: Sequence[Any],
        args: LinearFwdArgs,
        behind: Any,
        beside: list[Tensor],
    ) -> tuple[Value, list[SavedOperand]]:
        """Return the output and the backward's data."""
        features = self.features or tensors[self.weight].shape[0]
        if args.plan.few_rows and value.operand is None and has_few_rows(args, value.rows):
            x: Any = value.plain
            x = x if x.dim() == 2 else x.reshape(value.rows, x.shape[-1])
            out = fprop_of_few_rows(x, tensors[self.weight], tensors[self.bias], args, args.dtype, features)
            return Value(out, None, value.lead, value.rows), [SavedOperand([], None), SavedOperand([], None)]
        operand, w, rows, saved = self.operands(value, tensors, args)
        lead, parallel = value.lead, args.parallel
        dtype, processes = args.dtype, 1
        if parallel is not None:
            dtype = parallel.dtype_of_part(dtype, args.plan.batch_invariant)
            processes = parallel.processes_of_sum
        out = fprop(args.plan, operand, w, tensors[self.bias], dtype, rows, features, processes=processes)
        if parallel is not None and parallel.gathers_input:
            lead = (-1, *lead[1:])
        elif parallel is not None:
            out = parallel.reduced_output(out, args.dtype, args.plan.batch_invariant)
            rows = out.shape[0]
        return record(Value, (out, None, lead, rows)), saved

    def backward(
        self,
        flow: list[Grad],
        saved: list[Any],
        args: LinearBwdArgs,
        front: Any,
        scale: Tensor | None,
        grads: list[Tensor | None],
        beside: list[Tensor],
    ) -> None:
        """Put dgrad into ``flow``, None if it is not needed, and the other gradients into ``grads``."""
        weight, inp = _pop_last(saved, args.saved_weight[0]), _pop_last(saved, args.saved_input[0])
        grad = flow.pop()
        if grad.operand is None:
            plain: Any = grad.plain
            del grad
            dw, dx, db = linear_backward(args, plain, inp, weight, scale)
        else:
            operand, rows = grad.operand, grad.rows
            db = None if grad.sums is None else grad.sums.to(args.bias_dtype)
            del grad
            dw, dx, db = quantized_gradients(args, operand, db, inp, weight, rows)
        grads[self.weight], grads[self.bias] = dw, db
        flow.append(record(Grad, (dx, None, None, 0)))


def _tensors_of(kept: list[list[SavedOperand]]) -> list[Any]:
    tensors: list[Any] = []
    for stage in kept:
        for operand in stage:
            tensors += operand.tensors
    return tensors


def _pop_last(tensors: list[Any], count: int) -> list[Any]:
    """Return the last ``count`` tensors, in order, which the list loses."""
    first = len(tensors) - count
    last = tensors[first:]
    del tensors[first:]
    return last


# -- the interpreter ---------------------------------------------------------------------------------------------------

Stage = Norm | Activation | Linear


class Program:
    """Stages in a row, the last one a linear layer, as every second one may be; ``slots``: how many tensors they read.

    Programs are equal where they are one: of each kind of layer there is one, and its recordings are known by it.
    """

    key: str  # for graphs

    def __init__(self, stages: Sequence[Stage], slots: int) -> None:
        self.stages, self.slots = tuple(stages), slots
        give_key(self, repr((stages, slots)))
        self.linears = tuple([at for at, stage in enumerate(stages) if isinstance(stage, Linear)])
        self.others = tuple([at for at, stage in enumerate(stages) if not isinstance(stage, Linear)])
        self.linear_places: Any = slice_of(self.linears)
        self.other_places: Any = slice_of(self.others)
        # of each stage from the last to the first: where the scale of its backward is, that of the linear layer which
        # it is or which is before it; behind the last one without
        places = {at: place for place, at in enumerate(self.linears)}
        self.backwards = tuple(
            [(stage, at, places.get(at, places.get(at - 1, -1))) for at, stage in enumerate(stages)][::-1]
        )


def run_forward(
    stages: Sequence[Stage], args: Sequence[Any], tensors: Sequence[Any], last_gemm: bool = True
) -> tuple[Any, list[Tensor], list[list[SavedOperand]]]:
    """Return the output (*lead, N), what is returned beside it, and by stage what the backward reads.

    Args:
        args: what each stage reads besides its tensors.
        last_gemm: else there is no output.
    """
    inp, beside, kept = tensors[0], [], []  # type: ignore[var-annotated]
    value, following = record(Value, (inp, None, inp.shape[:-1], 0)), (*args[1:], None)
    behind: Any
    for stage, own, behind in zip(stages if last_gemm else stages[:-1], args, following):
        value, saved = stage.forward(value, tensors, own, behind, beside)
        kept.append(saved)
    if not last_gemm:
        *_, saved = stages[-1].operands(value, tensors, args[-1])  # type: ignore[union-attr]
        return None, beside, [*kept, saved]
    out: Any = value.plain
    if len(value.lead) != 1:
        out = out.view(*value.lead, out.shape[-1])
    return out, beside, kept


def run_backward(
    program: Program,
    records: Sequence[Any],
    saved: list[Any],
    dy: Tensor,
    beside: list[Tensor],
    scales: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return gradients of all tensors. Empties ``saved`` from its end, so that what a stage has read is freed.

    Args:
        records: what each stage reads besides saved tensors.
        dy: (M, N).
        beside: gradients of what was returned beside the output.
        scales: of the linear layers.
    """
    grads: list[Tensor | None] = [None] * program.slots
    flow, scale_of, fronts = [record(Grad, (dy, None, None, 0))], [*scales, None], (None, *records)
    for stage, at, place in program.backwards:
        stage.backward(flow, saved, records[at], fronts[at], scale_of[place], grads, beside)  # type: ignore[arg-type]
        if flow[0].plain is None and flow[0].operand is None:
            return grads
    grads[0] = flow[0].plain
    return grads


class ProgramArgs(NamedTuple):
    """What a call reads besides its tensors. ``args``: by stage; of a linear one, ``plan.needs_input`` says whether
    the stage before it has a backward. ``forward_plans``: of the linear stages, for a forward that makes nothing
    for the backward, which computes it again.
    """

    program: Program
    args: tuple[Any, ...]
    forward_plans: tuple[LinearPlan, ...] | None = None


class Recomputation(NamedTuple):
    """The forward that the backward runs again, without tensors.

    ``weights``: of the linear stages, where the weight was quantized already: how many buffers it has row-wise and
    column-wise, and their quantizer.
    """

    stages: list[Stage]
    args: list[Any]
    weights: list[tuple[int, int, Quantizer] | None]


class ProgramBwdArgs(NamedTuple):
    """The inputs of the backward besides saved tensors; never changed, so that it may run again.

    ``records``: by stage. ``recompute``: how to compute the forward once more, where only its tensors were saved.
    """

    program: Program
    records: tuple[Any, ...]
    recompute: Recomputation | None

    @property
    def backward_override(self) -> str | None:
        """The recipe's override."""
        return self.records[-1].backward_override  # type: ignore[no-any-return]

    @property
    def fp8(self) -> bool:
        """Whether the layer ran quantized."""
        return self.records[-1].fp8  # type: ignore[no-any-return]

    @property
    def grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer of the output's gradient."""
        return self.records[-1].grad_output_quantizer  # type: ignore[no-any-return]

    @property
    def reduce_and_update_bwd_fp8_tensors(self) -> bool:
        """Whether the backward renews scales: never, the next step does."""
        return False


def _for_recomputation(
    call: ProgramArgs, tensors: Sequence[Any], beside: list[Tensor]
) -> tuple[Recomputation, list[Tensor | None]]:
    """Return how to recompute the forward, and what to save: tensors, scales, buffers of quantized weights."""
    program, to_save, buffers = call.program, [*tensors], []  # type: ignore[var-annotated]
    stages, args, weights = [*program.stages], [*call.args], []  # type: ignore[var-annotated]
    first = stages[0]
    if isinstance(first, Norm):
        if first.residual is not None and args[0].returns_input:  # the sum is there
            to_save[0], to_save[first.residual] = beside[-1], None
        args[0] = args[0]._replace(returns_output=False, returns_input=False)
    for at in program.linears:
        stage, own = stages[at], args[at]
        weight, operand = tensors[stage.weight], own.workspace  # type: ignore[union-attr]
        if isinstance(weight, QuantizedTensorStorage):
            to_save[stage.weight] = None  # type: ignore[union-attr]
            stages[at] = replace(stage, features=weight.shape[0])  # type: ignore[call-arg]
            operand = buffers_of(weight) if operand is None else operand
        weights.append(
            None if operand is None else (len(operand.rowwise), len(operand.columnwise), operand.quantizer)
        )
        buffers += [] if operand is None else [*operand.rowwise, *operand.columnwise]
        to_save.append(own.scales.scale)
        args[at] = own._replace(scales=DelayedScales(), workspace=None, wgrad=TO_AUTOGRAD)
    return Recomputation(stages, args, weights), [*to_save, *buffers]


def _recomputed(
    objects: ProgramBwdArgs, again: Recomputation, saved: list[Any], dy: Tensor
) -> tuple[list[Any], list[Any]]:
    """Return records and what the forward would have saved, without the last GEMM."""
    program, records, args = objects.program, [*objects.records], [*again.args]
    tensors, buffers = saved[: program.slots], saved[program.slots + len(program.linears) :]
    for at, weight, scale in zip(program.linears, again.weights, saved[program.slots :]):
        workspace = None
        if weight is not None:
            rowwise, columnwise, quantizer = weight
            own, buffers = buffers[: rowwise + columnwise], buffers[rowwise + columnwise :]
            workspace = OperandBuffers(own[:rowwise], own[rowwise:], quantizer)
        args[at] = args[at]._replace(workspace=workspace, scales=DelayedScales(scale))
    place = again.stages[0].weight  # type: ignore[union-attr]
    norm_weight = tensors[place]
    tensors[place] = after(dy, norm_weight)
    _, _, kept = run_forward(again.stages, args, tensors, last_gemm=False)
    if kept[0][0].tensors[-3] is not None:
        kept[0][0].tensors[-3] = norm_weight
    for at in program.linears:
        records[at] = with_saved(records[at], *kept[at])
    return records, _tensors_of(kept)


# -- the boundary ------------------------------------------------------------------------------------------------------


class ProgramFunction(torch.autograd.Function):
    """The stages of a program, differentiable in its tensors.

    Operands: ``call``, which is not modified; the tensors of the program in the order of their places, input (*lead, K)
    first, weights plain or quantized, None if there is none. The result is (*lead, N) in the activation dtype, in a
    tuple with what the stages return beside it.
    """

    @staticmethod
    def forward(ctx: Any, call: ProgramArgs, *tensors: Any) -> Any:
        program, args = call.program, call.args
        if call.forward_plans is None:
            linears, how = args[program.linear_places], args[program.other_places]
            forward = replay_of(run_forward, [*tensors], linears, program, *how)
            out, beside, kept = forward(program.stages, args, tensors)
            recompute, to_save = None, _tensors_of(kept)
        else:
            first = [*args]
            for at, plan in zip(program.linears, call.forward_plans):
                first[at] = args[at]._replace(plan=plan)
            out, beside, kept = run_forward(program.stages, first, tensors)
            recompute, to_save = _for_recomputation(call, tensors, beside)
        records = [*args]
        for at in program.linears:
            stage = program.stages[at]
            records[at] = linear_bwd_args(args[at], tensors[stage.weight], tensors[stage.bias], *kept[at])  # type: ignore[union-attr]
        linears = args[program.linear_places]
        ctx.save_for_backward(*[linear.scales.scale for linear in linears], *to_save)
        # a tuple, for the backward empties the lists that it is given, and a retained graph runs again
        ctx.backward_objects = record(ProgramBwdArgs, (program, tuple(records), recompute))
        out = out.detach()
        return (out, *[tensor.view_as(tensor) for tensor in beside]) if beside else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *beside: Tensor) -> Any:
        objects: ProgramBwdArgs = ctx.backward_objects
        program, records, count = objects.program, objects.records, len(objects.program.linears)
        saved = list(saved_tensors(ctx))
        scales, saved = (
            saved[:count],
            saved[count:],
        )  # a star would leave a tuple to the compiler of PyTorch 2.11
        dy = grad_output if grad_output.dim() == 2 else grad_output.reshape(-1, grad_output.shape[-1])
        if objects.recompute is not None:
            records, saved = _recomputed(objects, objects.recompute, saved, dy)
        linears, how = records[program.linear_places], records[program.other_places]
        for linear in linears:
            begin_main_grads_(linear.wgrad)
        backward = replay_of(
            run_backward, [dy, *scales, *beside, *saved], linears, program, len(beside), *how
        )
        return (None, *backward(program, records, saved, dy, [*beside], scales))
