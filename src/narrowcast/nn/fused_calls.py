"""Norms, linear layers and an activation that are modules of their own, called as one: see :func:`norm_linear`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._tracing import in_eager
from ..autograd import (
    LinearFwdArgs,
    NormArgs,
    NormSettings,
    ProgramArgs,
    ProgramFunction,
    activate,
    traced_program,
)
from ..layers import checked_input
from ..layers.parameters import casts, check_hidden
from ..recipe import LinearPlan, Recipe
from ..upstream.modules import forward_hooks, forward_pre_hooks, has_backward_hooks
from .layernorm_linear import NORM_LINEAR
from .layernorm_mlp import NORM_MLP, activation_settings
from .linear import Linear
from .norm import RMSNorm

# The kind of a norm by its forward; narrowcast's two have one forward, and settings. A subclass may have its own.
_FORWARDS = {nn.RMSNorm.forward: "RMSNorm", nn.LayerNorm.forward: "LayerNorm", RMSNorm.forward: ""}


def norm_linear(
    norm: nn.Module, linear: nn.Module, inp: Tensor, is_first_microbatch: bool | None = None
) -> Tensor:
    """Return ``linear(norm(inp))``, under a recipe in one pass, as :class:`LayerNormLinear` computes it.

    The modules keep their parameters, names, recipes and delayed state. They are called one after the other where one
    pass does not compute what they do: without a recipe, with hooks or a forward of their own, split over processes, or
    if ``torch.autocast`` casts the input.

    Args:
        norm: ``RMSNorm`` or ``LayerNorm`` of PyTorch or of narrowcast, over the last dim and with a weight.
        linear: :class:`Linear`.
        inp: (*lead, in_features).
        is_first_microbatch: as of the layer.

    Numerics:
        fp32 statistics and product with gamma, rounded once, by the quantization: PyTorch's norm rounds to bf16 before.
    """
    settings, recipe = _settings(norm, inp), _recipe(inp, norm, linear)
    if settings is None or recipe is None:
        return _called(linear, norm(inp), is_first_microbatch)
    plans, (args,), inp = _prepared(recipe, norm, [linear], inp, is_first_microbatch)
    call = ProgramArgs(NORM_LINEAR, (NormArgs(settings, False, False), args))
    return _run(plans, (call, inp, norm.weight, _bias(norm), linear.weight, linear.bias))  # type: ignore[no-any-return]


def norm_mlp(
    norm: nn.Module,
    fc1: nn.Module,
    fc2: nn.Module,
    inp: Tensor,
    is_first_microbatch: bool | None = None,
    *,
    residual: Tensor,
    activation: str = "swiglu",
    activation_params: Mapping[str, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``fc2(activation(fc1(norm(x))))`` and the sum ``x = inp + residual``, as :class:`LayerNormMLP` does.

    Else like :func:`norm_linear`; without one pass, the activation is computed in the dtype of ``fc1``'s output.

    Args:
        fc1, fc2: :class:`Linear`.
        residual: like ``inp``.
        activation, activation_params: as of :class:`LayerNormMLP`; of a gated one, the gate is the first half.
    """
    how = activation_settings(activation, activation_params)
    settings, recipe = _settings(norm, inp), _recipe(inp, norm, fc1, fc2)
    if settings is None or recipe is None or inp.dtype != residual.dtype or inp.shape != residual.shape:
        x = inp + residual
        hidden = _called(fc1, norm(x), is_first_microbatch)
        return _called(fc2, activate(hidden, how), is_first_microbatch), x
    check_hidden(fc2, fc1.weight, fc2.weight, activation)  # type: ignore[arg-type]
    plans, (first, second), inp = _prepared(recipe, norm, [fc1, fc2], inp, is_first_microbatch, residual)
    call = ProgramArgs(NORM_MLP, (NormArgs(settings, False, True), first, how, second))
    operands = (call, inp, norm.weight, _bias(norm), fc1.weight, fc1.bias, fc2.weight, fc2.bias, residual)
    return _run(plans, operands)  # type: ignore[no-any-return]


def _called(linear: nn.Module, inp: Tensor, first: bool | None) -> Tensor:
    return linear(inp, is_first_microbatch=first) if isinstance(linear, Linear) else linear(inp)  # type: ignore[no-any-return]


def _settings(norm: Any, inp: Tensor) -> NormSettings | None:
    """Return how a norm normalizes; None for one that is not of the kinds that run in one pass."""
    kind = _FORWARDS.get(_forward_of(norm))
    if kind is None or norm.weight is None or norm.weight.dim() != 1 or norm.weight.dtype != inp.dtype:
        return None
    if not kind:
        return norm.settings  # type: ignore[no-any-return]
    # PyTorch's default is that of the dtype in which it computes
    return NormSettings(kind, float(torch.finfo(torch.float32).eps if norm.eps is None else norm.eps), False)


def _forward_of(module: nn.Module) -> Any:
    """Return the function behind ``module.forward``; that of its class, unless code has replaced it on the instance."""
    return getattr(module.forward, "__func__", None)


def _bias(norm: nn.Module) -> Tensor | None:
    return getattr(norm, "bias", None)


def _recipe(inp: Tensor, norm: nn.Module, *linears: Any) -> Recipe | None:
    """Return the recipe that all layers run under; None if there is not one, or they do more than multiply."""
    if any(forward_hooks(m) or forward_pre_hooks(m) or has_backward_hooks(m) for m in (norm, *linears)):
        return None
    if casts(inp) and torch.get_autocast_dtype(inp.device.type) != inp.dtype:
        return None
    for linear in linears:
        if type(linear) is not Linear or _forward_of(linear) is not Linear.forward:
            return None
        if not linear.only_multiplies(inp.dtype):
            return None
    found = [linear._recipe_in_force() for linear in linears]
    return found[0] if all(one is found[0] for one in found) else None


def _prepared(
    recipe: Recipe, norm: nn.Module, linears: list[Any], inp: Tensor, first: bool | None, *others: Tensor
) -> tuple[list[LinearPlan], list[LinearFwdArgs], Tensor]:
    """Return plans and arguments of the layers, and the checked input."""
    inp = checked_input(linears[0], inp, "in_features", linears[0].weight)
    needs_input = any(x is not None and x.requires_grad for x in (inp, norm.weight, _bias(norm), *others))
    plans, args = [], []
    for linear in linears:
        stage, weight, bias = linear._stages[0], linear.weight, linear.bias
        plans.append(linear._plan(recipe, stage, needs_input, weight))
        args.append(linear._fwd_args(stage, plans[-1], inp.dtype, weight, bias, first))
        needs_input |= weight.requires_grad or (bias is not None and bias.requires_grad)
    return plans, args, inp


def _run(plans: list[LinearPlan], operands: tuple[Any, ...]) -> Any:
    if any(plan.eager_only for plan in plans):
        return in_eager(ProgramFunction.apply, *operands)
    return (traced_program if is_dynamo_compiling() else ProgramFunction.apply)(*operands)
