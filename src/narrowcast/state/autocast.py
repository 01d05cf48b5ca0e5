"""``autocast`` and ``quantized_model_init``: contexts that set the current recipe.

The state is one plain object per thread. A ``threading.local`` holds it and nothing else: the compiler guards the
attributes of the plain object, those of the ``threading.local`` itself it does not. Nothing here is read in a backward:
a forward carries what its backward needs.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.torch_version import TorchVersion

from .._checks import flags, shown, typed
from .._device import get_device_compute_capability, is_mxfp8_available
from .._tracing import can_check, can_remember, warn, warn_of_old_name, while_tracing
from ..functional.collectives import checked_group
from ..recipe import (
    ALIASES,
    NAMES,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    recipe_from_name,
    share_plans,
)
from ..recipe.names import unknown_recipe
from ..upstream.autograd import graph_task_id, is_in_backward


class AutocastState:
    """The requests of one thread's autocast contexts.

    ``recipe``: in force, where ``depth``, the number of entered contexts, is not 0. ``calibrating``: collects amax
    only. ``entered``: contexts that eager code has entered and not left, in order; ``init_entered``: those of
    :class:`quantized_model_init`. ``recomputes``: whether the function that :func:`checkpoint` runs is run again; None
    outside any. ``restored``: the requests are those of a forward, in a function that is recomputed. ``reached``: a
    layer has run since the innermost context was entered.
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.calibrating: Recipe | None = None
        self.group: Any = None
        self.depth = 0
        self.init_entered: list[quantized_model_init] = []
        self.entered: list[autocast] = []
        self.recomputes: bool | None = None
        self.restored = self.reached = False

    @property
    def init_recipe(self) -> Recipe | None:
        """Recipe of the innermost :class:`quantized_model_init`; None outside any, and where that is disabled."""
        return self.init_entered[-1].recipe if self.init_entered else None

    @property
    def init_preserve(self) -> bool:
        """Whether the innermost one keeps initial values in high precision."""
        return bool(self.init_entered) and self.init_entered[-1].preserve

    def get(self) -> tuple[Any, ...]:
        """Return the fields that entering a context changes, for :meth:`set`."""
        return self.recipe, self.calibrating, self.group, self.depth

    def set(self, values: tuple[Any, ...]) -> None:
        """Put back what :meth:`get` gave; scales are not renewed."""
        self.recipe, self.calibrating, self.group, self.depth = values


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = AutocastState()


THREAD = _Thread()


def is_fp8_enabled() -> bool:
    """Return whether an enabled autocast is in force."""
    return THREAD.state.recipe is not None


def is_fp8_calibration() -> bool:
    """Return whether an autocast only collects amax."""
    return THREAD.state.calibrating is not None


def get_fp8_recipe() -> Recipe:
    """Return the recipe of the current autocast, or the default one outside autocast."""
    recipe = THREAD.state.recipe
    return get_default_recipe() if recipe is None else recipe


def get_fp8_group() -> Any:
    """Return the amax reduction group of the current autocast."""
    return THREAD.state.group


def get_autocast_state() -> tuple[Any, ...]:
    """Return the requests of this thread's contexts, for :func:`set_autocast_state`."""
    return THREAD.state.get()


def set_autocast_state(state: tuple[Any, ...]) -> None:
    """Put back what :func:`get_autocast_state` gave; scales are not renewed."""
    THREAD.state.set(state)


def with_fp8_parameters() -> bool:
    """Return whether parameters created now are quantized."""
    return THREAD.state.init_recipe is not None


def get_default_recipe() -> Recipe:
    """Return the default recipe: MXFP8 if native, current scaling on capability 12 and newer, else delayed."""
    if is_mxfp8_available():
        return MXFP8BlockScaling()
    if get_device_compute_capability() >= (12, 0):
        return Float8CurrentScaling()
    return DelayedScaling()


def checked_recipe(recipe: Any, owner: str, none: str = "None is high precision") -> Recipe | None:
    """Return None, or a recipe with the plans that equal ones have made.

    Args:
        recipe: a recipe, the name of one, or None.
        owner: whose argument it is, for the message.
        none: what is high precision there, for the message.
    Raises:
        TypeError: something else.
        ValueError: a name that no recipe has.
    """
    if recipe is None:
        return None
    if isinstance(recipe, str):
        recipe = _recipe_named(recipe, owner, none)
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(f"{owner}: recipe is the class {recipe.__name__}; call it: {recipe.__name__}()")
    if isinstance(recipe, ModuleType) and (name := recipe.__name__.rpartition(".")[2]) in NAMES:
        raise TypeError(
            f"{owner}: recipe is the module {recipe.__name__}; pass {shown(name)}, the recipe's name"
        )
    if not isinstance(recipe, Recipe):
        tables = "; convert and set_recipe take tables" if isinstance(recipe, Mapping) else ""
        raise TypeError(
            f"{owner}: recipe is {typed(recipe)}; pass one of narrowcast.recipe's recipes, or a name such as 'current'"
            f"{tables}"
        )
    if can_remember():
        share_plans(recipe)
    return recipe


def _recipe_named(name: str, owner: str, none: str) -> Recipe:
    if name not in NAMES and name not in ALIASES:
        raise ValueError(f"{owner}: {unknown_recipe(name, none)}")
    return recipe_from_name(name)


class autocast:
    """Run the layers inside in low precision, whatever recipe they own.

    Use it as a context manager or a decorator, around or inside a compiled function. An instance may be used again
    after it was left. Contexts of one thread may be left in any order, also by another thread that closes a generator.

    Modules of PyTorch run as they do outside: :func:`narrowcast.convert` makes them layers that take a recipe.

    Args:
        enabled: False runs the layers in high precision.
        calibrating: with ``enabled=False`` and a delayed-scaling recipe, collect amax in modules of ``nc.nn``.
        recipe: a recipe or its name; None takes :func:`get_default_recipe`.
        amax_reduction_group: the result of :func:`get_fp8_group`. Nothing is reduced over it: a warning names the call
            that does.
    Raises:
        TypeError: ``recipe`` is not a recipe, a recipe is passed as ``enabled``, or the group is none.
        ValueError: the group is the name of none.
        RuntimeError: the instance is active; or, before PyTorch 2.13, it is entered inside a compiled
            ``torch.utils.checkpoint``.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        flags(enabled=enabled, calibrating=calibrating)
        if recipe is None and (enabled or calibrating):
            recipe = get_default_recipe()
        chosen = checked_recipe(recipe, "autocast", "enabled=False is high precision")
        if amax_reduction_group is not None and can_check():
            checked_group(amax_reduction_group, "amax_reduction_group")
            if getattr(chosen, "reduce_amax", False):
                _warn_of_group()
        self.enabled = enabled
        self.recipe = chosen if enabled else None
        self.calibrating = chosen if calibrating and not enabled else None
        self.group = amax_reduction_group
        self.previous: tuple[Any, ...] | None = None
        self.entered_in: AutocastState | None = None
        self.backward = -1  # the one that it was entered in
        self.reached_before = False

    used = False
    """One was entered in this process."""
    told = False
    """The warning of one in which no layer ran was given."""

    def __enter__(self) -> None:
        if self.previous is not None:
            raise RuntimeError("this autocast is active already; make a new one to nest")
        state = THREAD.state
        compiling = while_tracing(_begin_writes)
        if not compiling:
            state.entered.append(self)
            self.entered_in, self.backward, autocast.used = state, graph_task_id(), True
            self.reached_before, state.reached = state.reached, False
        self.previous = state.get()
        state.recipe, state.calibrating, state.group = self.recipe, self.calibrating, self.group
        state.depth += 1
        while_tracing(_end_writes)

    def __exit__(self, *exception: Any) -> None:
        previous, self.previous = self.previous, None
        if while_tracing(_begin_writes):
            THREAD.state.set(previous)  # type: ignore[arg-type]
            while_tracing(_end_writes)
            return
        # not this thread's, where another one collects or closes the generator that entered
        state = self.entered_in or THREAD.state
        self.entered_in = None
        reached, state.reached = state.reached, state.reached or self.reached_before
        if self in state.entered:
            later = state.entered[state.entered.index(self) + 1 :]
            state.entered.remove(self)
            if (
                later
            ):  # left out of order: the next one returns to this one's state, and all are one less deep
                later[0].previous = previous
                for context in later[1:]:
                    *values, depth = context.previous  # type: ignore[misc]
                    context.previous = (*values, depth - 1)
                state.depth -= 1
                return
        state.set(previous)  # type: ignore[arg-type]
        if not (reached or autocast.told or self.recipe is None or any(exception)):
            _warn_of_plain_model()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        recipe, calibrating = self.recipe or self.calibrating, self.calibrating is not None
        enabled, group = self.enabled, self.group

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # built inside: the compiler cannot enter a context manager made outside the traced code
            with autocast(enabled, calibrating, recipe, group):
                return function(*args, **kwargs)

        return wrapped


def _warn_of_group() -> None:
    warnings.warn(  # one text: shown once
        "autocast reduces no amax over its amax_reduction_group; call narrowcast.set_recipe(model, recipe, "
        "amax_group=group) once, or narrowcast.reduce_delayed_scaling(model, group) before every optimizer.step()",
        stacklevel=3,
    )


def _warn_of_plain_model() -> None:
    autocast.told = True
    warn(
        "nothing inside this autocast ran in low precision: it reaches layers of narrowcast alone, and none ran; call "
        "narrowcast.convert(model, recipe) first"
    )


def starts_a_step() -> bool:
    """Return whether a forward that runs now is no recomputation."""
    return not is_in_backward()


def entered_in_backward() -> bool:
    """Return whether the autocast in force was entered in the backward that runs, by what is recomputed."""
    state = THREAD.state
    return state.restored or (bool(state.entered) and state.entered[-1].backward == graph_task_id())


_CHECKPOINT_REFUSES_MUTATION = TorchVersion(torch.__version__) < "2.13"


def _begin_writes(context: Any) -> None:
    """Make the compiler allow an autocast's writes inside a checkpoint, until the autocast ends.

    Raises:
        RuntimeError: inside a checkpoint, where this version of PyTorch allows nothing.
    """
    from ..upstream import dynamo  # loads Dynamo, which is there already where code is traced

    if not _CHECKPOINT_REFUSES_MUTATION:
        dynamo.begin_side_effects(context)
    elif dynamo.is_in_subgraph(context):
        raise RuntimeError(
            f"torch {torch.__version__} cannot compile an autocast that is entered inside torch.utils.checkpoint; give "
            "the layers their own recipe (narrowcast.set_recipe), or enter autocast around the checkpoint"
        )


def _end_writes(context: Any) -> None:
    from ..upstream import dynamo

    if not _CHECKPOINT_REFUSES_MUTATION:
        dynamo.end_side_effects(context)


class fp8_autocast(autocast):
    """Old name of :class:`autocast`."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | str | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        warn_of_old_name("fp8_autocast is now called autocast")
        super().__init__(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class quantized_model_init:
    """Create modules whose weights are stored quantized.

    Under ``torch.no_grad()`` the weights lack the data that only a backward reads: half the bytes.

    Args:
        enabled: False creates ordinary parameters.
        recipe: the recipe, or its name, whose weight quantizer is used; None takes :func:`get_default_recipe`. Delayed
            scaling has no history yet, so its weights are scaled by their own amax.
        preserve_high_precision_init_val: keep a CPU copy of the initial value. Read it with
            ``param.get_high_precision_init_val()``, drop it with ``param.clear_high_precision_init_val()``.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | str | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        flags(enabled=enabled, preserve_high_precision_init_val=preserve_high_precision_init_val)
        recipe = checked_recipe(get_default_recipe() if recipe is None else recipe, "quantized_model_init")
        self.recipe = recipe if enabled else None
        self.preserve = preserve_high_precision_init_val
        self.entered_in: list[AutocastState] = []

    def __enter__(self) -> None:
        state = THREAD.state
        self.entered_in.append(state)
        state.init_entered.append(self)

    def __exit__(self, *exception: Any) -> None:
        """Leave the innermost of this instance, be it in any order: the innermost that is left over is in force."""
        state = self.entered_in.pop()
        if self in state.init_entered:
            del state.init_entered[-1 - state.init_entered[::-1].index(self)]


class fp8_model_init(quantized_model_init):
    """Old name of :class:`quantized_model_init`."""

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | str | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        warn_of_old_name("fp8_model_init is now called quantized_model_init")
        super().__init__(enabled, recipe, preserve_high_precision_init_val)
