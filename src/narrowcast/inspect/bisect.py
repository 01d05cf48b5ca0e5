"""``bisect``: find the layer whose precision costs the gradients the most.

The model runs once with every layer in high precision, and then once for each layer with that one alone under its
recipe. This separates the errors of single layers, unlike the error of all together: every layer's error reaches
the gradients of the others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from .._table import as_table
from ..layers import LinearLayer, RecipeOwner, Snapshot
from ..layers.patterns import Selectors, selected_names
from ..recipe import Recipe
from ..state import THREAD, checked_recipe


@dataclass(frozen=True)
class LayerError:
    """The error of one layer's precision.

    Attributes:
        gradient: ||g - g_high|| / ||g_high|| over all parameters.
        loss: the difference of the losses.
    """

    layer: str
    gradient: float
    loss: float


@dataclass(frozen=True)
class Bisection:
    """Layers by gradient error, largest first.

    Attributes:
        together: the error of all under their recipes at once.
    """

    layers: tuple[LayerError, ...]
    together: LayerError

    @property
    def worst(self) -> str:
        """Name of the layer whose precision costs the most."""
        return self.layers[0].layer

    def __str__(self) -> str:
        rows = []
        for one in (*self.layers, self.together):
            rows.append((one.layer or "(the model)", f"{one.gradient:.3%}", f"{one.loss:+.3g}"))
        return "\n".join(as_table(("layer", "gradient error", "loss difference"), rows, frozenset((1, 2))))

    def __repr__(self) -> str:
        """Return the table, which an interactive session shows."""
        return str(self)


def bisect(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    recipe: Recipe | str | None = None,
    only: Selectors = None,
) -> Bisection:
    """Rank the layers of a model by the gradient error of their precision, relative to high precision.

    It takes a forward and a backward per layer and restores the model: gradients, ``main_grad``, waiting weight
    gradients, recipes, the state of delayed scaling, random numbers. Every run draws the same numbers.

    Args:
        model: its layers own their recipes (``convert``, ``set_recipe``); not compiled.
        batch: a mapping of keyword arguments, a tuple of positional ones, or the one argument.
        loss: a function of the model's result; default its ``loss`` attribute, as in models of Transformers.
        recipe: a recipe or its name, for every layer instead of its own.
        only: the layers to try, as in :func:`narrowcast.convert`; default all.
    Raises:
        ValueError: no layer has a recipe, no parameter has a gradient, or a pattern has no match; the loss is not one
            number, or the gradients in high precision are 0 or not finite.
        TypeError: there is no loss, or the model does not take the batch.
        RuntimeError: it is called inside an autocast.
    """
    if THREAD.state.depth:
        raise RuntimeError(
            "bisect was called inside an autocast, which overrides all recipes; call it outside"
        )
    _checks.module("model", model)
    if loss is not None:
        _checks.function("loss", loss, "lambda output: output.square().mean()")
    owners = {name: layer for name, layer in model.named_modules() if isinstance(layer, RecipeOwner)}
    recipe = checked_recipe(recipe, "bisect")
    own = {name: recipe or layer.recipe for name, layer in owners.items()}
    tried = [name for name in owners if own[name] is not None]
    if not owners:
        raise ValueError("the model has no layer of narrowcast; call narrowcast.convert first")
    if not tried:
        raise ValueError(
            "no layer of the model has a recipe; call narrowcast.convert or set_recipe, or pass recipe="
        )
    if only is not None:
        tried = selected_names(
            only, {name: owners[name] for name in tried}, model, "layer with a recipe", "only"
        )
    state = Snapshot([model])
    try:
        for layer in owners.values():
            if isinstance(layer, LinearLayer):  # the gradients are compared, and must come from autograd
                layer.fuse_wgrad_accumulation = layer.delay_wgrad_compute = False
        high, high_loss = _gradients(model, batch, loss, owners, {})
        norm = torch.stack([one.double().square().sum() for one in high]).sum().sqrt().item()
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradients in high precision have norm {norm}, so no error is relative to them; give a batch, a "
                "loss and weights without NaN and infinities"
            )
        if not norm:
            raise ValueError(
                "the gradients in high precision are all 0; give a batch and a loss that reach the model"
            )

        def error(name: str, recipes: Mapping[str, Recipe | None]) -> LayerError:
            grads, value = _gradients(model, batch, loss, owners, recipes)
            squares = [(one.double() - other.double()).square().sum() for one, other in zip(grads, high)]
            return LayerError(name, torch.stack(squares).sum().sqrt().item() / norm, value - high_loss)

        errors = [error(name, {name: own[name]}) for name in tried]
        together = error("all together", own)
    finally:
        state.restore()
    return Bisection(tuple(sorted(errors, key=lambda one: -one.gradient)), together)


def _gradients(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None,
    owners: Mapping[str, RecipeOwner],
    recipes: Mapping[str, Recipe | None],
) -> tuple[Sequence[Tensor], float]:
    """Return gradients of the parameters and the loss with each layer under the recipe that is given for it."""
    for name, layer in owners.items():
        layer.recipe = recipes.get(name)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("no parameter of the model requires a gradient")
    devices = [parameter.device for parameter in parameters if parameter.is_cuda]
    with torch.random.fork_rng(devices=list(dict.fromkeys(devices))), torch.enable_grad():
        torch.manual_seed(0)
        named = dict(batch) if isinstance(batch, Mapping) else {}
        inputs = () if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
        try:
            out = model(*inputs, **named)
        except TypeError:
            kind = _checks.article(type(model).__name__)
            how = "a tuple gives inputs by position, a mapping by name; targets belong in loss="
            _check_takes(model, f"the model, {kind}, does not take the batch", how, *inputs, **named)
            raise
        try:
            value = getattr(out, "loss", None) if loss is None else loss(out)
        except TypeError:
            _check_takes(loss, "loss does not take the model's result alone", "pass a function of it", out)
            raise
        if loss is not None and not (isinstance(value, Tensor) and value.requires_grad):
            raise TypeError(
                f"loss returned {_checks.typed(value)}; return a tensor with a gradient, such as "
                "out.square().mean()"
            )
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the model returned {_checks.a_kind(out)} without a loss; pass loss=, a function of it"
            )
        if value.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(value.shape)}; return one number, such as its mean")
        grads = torch.autograd.grad(value, parameters, allow_unused=True)
    used = [torch.zeros(1, dtype=torch.float32) if grad is None else grad for grad in grads]
    return [grad.to(parameters[0].device) for grad in used], value.item()


def _check_takes(function: Any, what: str, remedy: str, *inputs: Any, **named: Any) -> None:
    """Check whether a function or model can be called so.

    Raises:
        TypeError: it has more or fewer arguments, or others.
    """
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:  # of C
        return
    try:
        signature.bind(*inputs, **named)
    except TypeError as error:
        raise TypeError(f"{what} ({error}); {remedy}, such as lambda out: mse_loss(out, y)") from None
