"""The autograd functions of layers, each as one node of a graph.

Dynamo traces a call of an autograd function line by line, with its backward, and guards what both read. Here it only
writes down the call of a function that it does not enter. AOTAutograd, which runs what the graph holds, runs that
function on its own tensors and records the same operators; and its cache keeps the graph for the next process, which it
refuses to do with an autograd function.

Such a call takes tensors, numbers and text. So a plan and a program cross as the keys under which they are known, and
one string is guarded in place of all their fields. What cannot cross is traced as before: inputs that came quantized, a
recipe made inside the graph, a ``main_grad``, transforms of ``torch.func``.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch import Tensor

from .._tracing import by_key, while_tracing
from ..functional.quantizer_value import rules_of_graphs
from ..functional.wgrad_store import store_of
from ..upstream.compiler import held_compiling, mark_cacheable, start_kernels_statically
from ..upstream.tensors import in_transform
from .activation import ActivationSettings
from .adapter import AdaptedLinearFunction
from .arguments import DelayedScales, LinearFwdArgs, LinearWgrad
from .grouped_linear import grouped_linear
from .groups import Groups
from .linear import LinearFunction
from .norm import NormSettings
from .program import Activation, Linear, Norm, NormArgs, ProgramArgs, ProgramFunction
from .tensor_parallel import TensorParallel

_PROCESS = uuid.uuid4().hex


def traced_linear(weight: Any, inp: Any, bias: Tensor | None, args: LinearFwdArgs) -> Any:
    """Return what ``LinearFunction.apply`` returns of these operands."""
    if _cross(_key(args), weight, inp, bias):
        return _linear(weight, inp, bias, _packed(args))
    return LinearFunction.apply(weight, inp, bias, args)


def traced_adapted(
    weight: Any, inp: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, args: Any
) -> Any:
    """Return what ``AdaptedLinearFunction.apply`` returns of these operands."""
    if _cross(_key(args), weight, inp, bias, a, b):
        return _adapted(weight, inp, bias, a, b, scaling, _packed(args))
    return AdaptedLinearFunction.apply(weight, inp, bias, a, b, scaling, args)


def traced_grouped(
    inp: Tensor, splits: Tensor, weights: list[Any], biases: list[Any], args: LinearFwdArgs, groups: Groups
) -> Any:
    """Return what ``grouped_linear`` returns of these operands."""
    returns_new = groups.out is None and groups.dgrad_out is None
    if returns_new and _cross(_key(args), inp, splits, *weights, *biases):
        sizes = groups.count, groups.out_features, groups.in_features
        how = groups.split_weights, groups.split_biases, groups.covered
        return _grouped(inp, splits, weights, biases, _packed(args), (*sizes, *how))
    return grouped_linear(inp, splits, weights, biases, args, groups)


def traced_program(call: ProgramArgs, *tensors: Any) -> Any:
    """Return what ``ProgramFunction.apply`` returns of these operands."""
    keys = [_key(call.args[at]) for at in call.program.linears]
    again = None if call.forward_plans is None else tuple([plan.key for plan in call.forward_plans])
    if _cross("" if "" in keys else keys[0], *tensors):
        packed = tuple([_PACK[type(own)](own) for own in call.args])
        return _program(call.program.key, packed, again, *tensors)
    return ProgramFunction.apply(call, *tensors)


def _key(args: LinearFwdArgs) -> str:
    """Return the key of the plan; "" where the backward writes to ``main_grad``, which no node may do to its input."""
    return args.plan.key if args.wgrad.main_grad is None else ""


def _cross(key: str, *operands: Any) -> bool:
    """Return whether these operands, and a plan of this key, may be those of a node."""
    if key == "" or in_transform() or not all(one is None or isinstance(one, Tensor) for one in operands):
        return False
    return while_tracing(_allow_in_graph)


# -- the node ----------------------------------------------------------------------------------------------------------


@held_compiling
def _linear(weight: Any, inp: Any, bias: Tensor | None, packed: tuple[Any, ...]) -> Any:
    return LinearFunction.apply(weight, inp, bias, _linear_args(*packed))


@held_compiling
def _adapted(weight: Any, inp: Any, bias: Tensor | None, a: Any, b: Any, scaling: float, packed: Any) -> Any:
    return AdaptedLinearFunction.apply(weight, inp, bias, a, b, scaling, _linear_args(*packed))


@held_compiling
def _grouped(
    inp: Tensor, splits: Tensor, weights: Any, biases: Any, packed: Any, groups: tuple[Any, ...]
) -> Any:
    return grouped_linear(inp, splits, weights, biases, _linear_args(*packed), Groups(*groups))


@held_compiling
def _program(key: str, packed: tuple[Any, ...], again: tuple[str, ...] | None, *tensors: Any) -> Any:
    program = by_key(key)
    args = tuple([_ARGS_OF[type(stage)](*own) for stage, own in zip(program.stages, packed)])
    plans = None if again is None else tuple([by_key(plan) for plan in again])
    return ProgramFunction.apply(ProgramArgs(program, args, plans), *tensors)


_NODES = [_linear, _adapted, _grouped, _program]


def _allow_in_graph(context: Any) -> None:
    torch.compiler.allow_in_graph(_NODES)
    mark_cacheable(rules_of_graphs(), _NODES)
    if torch.cuda.is_available():  # before a key of the cache is made, of which the option is a part
        start_kernels_statically()


# -- what crosses ------------------------------------------------------------------------------------------------------


def _packed(args: LinearFwdArgs) -> tuple[Any, ...]:
    plan, dtype, scales, workspace, wgrad, needs_bias, transposes, parallel, stored = args
    key = None if wgrad.store is None else wgrad.store.key
    split = None
    if parallel is not None:
        # the name of a group may stand for another one in the next process, so that no cache of it may serve there
        split = parallel.mode, parallel.group, parallel.sequence_parallel, _PROCESS
    state = scales.scale, scales.amax, workspace, stored
    return plan.key, dtype, state, tuple(wgrad._replace(store=None)), key, needs_bias, transposes, split


def _linear_args(
    key: str,
    dtype: torch.dtype,
    state: tuple[Any, ...],
    wgrad: tuple[Any, ...],
    store: str | None,
    needs_bias: bool,
    transposes: bool,
    split: tuple[Any, ...] | None,
) -> LinearFwdArgs:
    scale, amax, workspace, stored = state
    into = LinearWgrad(*wgrad)._replace(store=None if store is None else store_of(store))
    parallel = None if split is None else TensorParallel(*split[:-1])
    scales = DelayedScales(scale, amax)
    return LinearFwdArgs(
        by_key(key), dtype, scales, workspace, into, needs_bias, transposes, parallel, stored
    )


def _packed_norm(args: NormArgs) -> tuple[Any, ...]:
    how = args.settings
    return (how.normalization, how.eps, how.zero_centered_gamma), args.returns_output, args.returns_input


def _norm_args(settings: tuple[str, float, bool], returns_output: bool, returns_input: bool) -> NormArgs:
    return NormArgs(NormSettings(*settings), returns_output, returns_input)


def _packed_activation(settings: ActivationSettings) -> tuple[Any, ...]:
    return settings.activation, settings.parameters


_PACK = {LinearFwdArgs: _packed, NormArgs: _packed_norm, ActivationSettings: _packed_activation}
_ARGS_OF: dict[type, Any] = {Linear: _linear_args, Norm: _norm_args, Activation: ActivationSettings}
