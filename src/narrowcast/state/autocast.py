"""``autocast`` and ``quantized_model_init``: which recipe is in force.

One plain object holds the state and class-based context managers swap its fields, because that is what the compiler
can trace. Nothing here is read in a backward: a forward carries what its backward needs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from .._device import get_device_compute_capability, is_mxfp8_available
from ..recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from .delayed_scaling import prepare_custom_recipe, update_delayed_states


class AutocastState:
    """The recipe in force and how deep the enabled autocast contexts are nested."""

    __slots__ = ("calibrating", "depth", "group", "init_preserve", "init_recipe", "recipe", "training")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to no recipe, outside any context."""
        self.recipe: Recipe | None = None
        self.calibrating: Recipe | None = None
        self.group: Any = None
        self.depth = 0
        self.training = False  # inside the first forward of a checkpoint of a training step
        self.init_recipe: Recipe | None = None
        self.init_preserve = False


STATE = AutocastState()


def is_fp8_enabled() -> bool:
    """Whether an enabled autocast is in force."""
    return STATE.recipe is not None


def is_fp8_calibration() -> bool:
    """Whether an autocast only collects amax."""
    return STATE.calibrating is not None


def get_fp8_recipe() -> Recipe:
    """The recipe in force, or the default one outside autocast."""
    return get_default_recipe() if STATE.recipe is None else STATE.recipe


def get_fp8_group() -> Any:
    """The amax reduction group of the autocast in force."""
    return STATE.group


def get_autocast_state() -> tuple[Recipe | None, Recipe | None, Any]:
    """(recipe in force, recipe that only calibrates, reduction group), for :func:`set_autocast_state`."""
    return STATE.recipe, STATE.calibrating, STATE.group


def set_autocast_state(state: tuple[Recipe | None, Recipe | None, Any]) -> None:
    """Put back what :func:`get_autocast_state` gave; scales are not renewed."""
    STATE.recipe, STATE.calibrating, STATE.group = state


def with_fp8_parameters() -> bool:
    """Whether parameters created now are quantized."""
    return STATE.init_recipe is not None


def get_default_recipe() -> Recipe:
    """MXFP8 where it is native, current scaling on capability 12 and newer, else delayed scaling."""
    if is_mxfp8_available():
        return MXFP8BlockScaling()
    if get_device_compute_capability() >= (12, 0):
        return Float8CurrentScaling()
    return DelayedScaling()


class autocast:
    """Run the modules inside in low precision.

    Usable as a context manager or a decorator, around a compiled function or inside it. An instance may be used again
    once it was left.

    Args:
        enabled: False runs the modules in high precision.
        calibrating: with ``enabled=False`` and a delayed-scaling recipe, collect amax on the way.
        recipe: how to quantize; None takes :func:`get_default_recipe`.
        amax_reduction_group: process group for delayed scaling's amax; None is the default group.
    Raises:
        TypeError: ``recipe`` is no recipe. RuntimeError: entering an instance that is active.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"recipe is a {type(recipe).__name__}; pass one of narrowcast.recipe's recipes")
        chosen = get_default_recipe() if recipe is None and (enabled or calibrating) else recipe
        self.enabled = enabled
        self.recipe = chosen if enabled else None
        self.calibrating = chosen if calibrating and not enabled else None
        self.group = amax_reduction_group
        self.graph = _graph
        self.previous: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if self.previous is not None:
            raise RuntimeError("this autocast is active already; make a new one to nest")
        recipe = self.recipe
        if isinstance(recipe, CustomRecipe) and not torch.compiler.is_compiling():
            prepare_custom_recipe(recipe)
        if recipe is not None and STATE.depth == 0 and not self.graph and _starts_a_step():
            update_delayed_states(recipe, self.group)
        self.previous = (STATE.recipe, STATE.calibrating, STATE.group, STATE.depth)
        STATE.recipe, STATE.calibrating, STATE.group = recipe, self.calibrating, self.group
        if recipe is not None:
            STATE.depth += 1

    def __exit__(self, *exception: Any) -> None:
        STATE.recipe, STATE.calibrating, STATE.group, STATE.depth = self.previous  # type: ignore[misc]
        self.previous = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        recipe, calibrating = self.recipe or self.calibrating, self.calibrating is not None
        enabled, group, graph = self.enabled, self.group, self.graph

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # built inside: the compiler cannot enter a context manager made outside of what it traces
            with autocast(enabled, calibrating, recipe, group, graph):
                return function(*args, **kwargs)

        return wrapped


def _starts_a_step() -> bool:
    """Whether entering autocast now starts a training step: not without gradients, not inside a backward."""
    if not (torch.is_grad_enabled() or STATE.training):
        return False
    # a forward that is recomputed in the backward must see the scales of the first one
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1


class fp8_autocast(autocast):
    """Old name of :class:`autocast`."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        _warn_old_name("fp8_autocast", "autocast")
        super().__init__(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class _recompute:
    """Enter the state a forward ran under, for its recomputation; ``training``: it is part of a training step."""

    def __init__(self, recipe: Recipe | None, group: Any, training: bool) -> None:
        self.entered = (recipe, group, training)

    def __enter__(self) -> None:
        self.previous = (STATE.recipe, STATE.group, STATE.training)
        STATE.recipe, STATE.group, STATE.training = self.entered

    def __exit__(self, *exception: Any) -> None:
        STATE.recipe, STATE.group, STATE.training = self.previous


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint`` whose recomputation runs under the recipe of the first forward.

    PyTorch's own works, too, where the function enters ``autocast`` itself; but not in its reentrant form with delayed
    scaling: that one runs the first forward without gradients, which leaves the scales as they are.

    Args:
        function: what to recompute in the backward.
        use_reentrant: as in PyTorch; only the non-reentrant form compiles.
        **kwargs: for the function and, as in PyTorch, for the checkpoint.
    """
    run = torch.utils.checkpoint.checkpoint
    if torch.compiler.is_compiling():
        return run(function, *args, use_reentrant=False, **kwargs)
    recipe, group, training = STATE.recipe, STATE.group, torch.is_grad_enabled()

    @functools.wraps(function)
    def under_recipe(*inner_args: Any, **inner_kwargs: Any) -> Any:
        with _recompute(recipe, group, training):
            return function(*inner_args, **inner_kwargs)

    return run(under_recipe, *args, use_reentrant=use_reentrant, **kwargs)


class quantized_model_init:
    """Modules made inside keep their weights quantized.

    Args:
        enabled: False makes ordinary parameters.
        recipe: whose weight quantizer to use; None takes :func:`get_default_recipe`. Delayed scaling has no history
            when a weight is made, so its weights are scaled by their own amax.
        preserve_high_precision_init_val: keep a CPU copy of the initial value, read by
            ``param.get_high_precision_init_val()`` and dropped by ``param.clear_high_precision_init_val()``.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"recipe is a {type(recipe).__name__}; pass one of narrowcast.recipe's recipes")
        self.recipe = (get_default_recipe() if recipe is None else recipe) if enabled else None
        self.preserve = preserve_high_precision_init_val
        self.previous: list[tuple[Recipe | None, bool]] = []

    def __enter__(self) -> None:
        self.previous.append((STATE.init_recipe, STATE.init_preserve))
        STATE.init_recipe, STATE.init_preserve = self.recipe, self.preserve

    def __exit__(self, *exception: Any) -> None:
        STATE.init_recipe, STATE.init_preserve = self.previous.pop()


class fp8_model_init(quantized_model_init):
    """Old name of :class:`quantized_model_init`."""

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        _warn_old_name("fp8_model_init", "quantized_model_init")
        super().__init__(enabled, recipe, preserve_high_precision_init_val)


def _warn_old_name(old: str, new: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=3)
