"""``checkpoint``: PyTorch's, whose recomputation runs under the recipe of the first forward.

Under delayed scaling a recomputed layer reads the scales that its forward read: no step was in between.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from .. import _checks, _keywords
from ..upstream.autograd import is_in_backward
from .autocast import THREAD, entered_in_backward, is_fp8_enabled


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether the current code runs inside :func:`checkpoint`, under an autocast's recipe."""
    return THREAD.state.recomputes is not None and is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether the current code is the recomputation of :func:`checkpoint`, under an autocast's recipe."""
    return bool(THREAD.state.recomputes) and is_fp8_enabled()


class _under:
    """Enter a state that :meth:`AutocastState.get` gave, for a checkpointed function: its first run, or another."""

    def __init__(self, values: tuple[Any, ...], rerun: bool, known: bool) -> None:
        self.values, self.rerun, self.known = values, rerun, known

    def __enter__(self) -> None:
        state = THREAD.state
        self.previous = state.get(), state.recomputes, state.restored
        state.set(self.values)
        state.recomputes, state.restored = self.rerun, self.known

    def __exit__(self, *exception: Any) -> None:
        values, recomputes, restored = self.previous
        THREAD.state.set(values)
        THREAD.state.recomputes, THREAD.state.restored = recomputes, restored


_CHECKPOINT_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug")
_TRACKER = "lambda: tracker, of a narrowcast.CudaRNGStatesTracker"
_OWN_OPTIONS = ("use_reentrant", "distribute_saved_activations", "get_rng_state_tracker", "tp_group")


def _check_keywords(function: Callable[..., Any], keywords: dict[str, Any]) -> None:
    """Check what PyTorch's checkpoint takes, and names that neither it nor the function takes.

    Raises:
        TypeError: an option of another type, or an unknown name.
        ValueError: an unknown check.
    """
    _checks.flags(preserve_rng_state=keywords.get("preserve_rng_state"), debug=keywords.get("debug"))
    if "context_fn" in keywords:
        _checks.function("context_fn", keywords["context_fn"], "one that returns two contexts")
    check = keywords.get("determinism_check", "default")
    if not _checks.is_one_of(check, ("default", "none")):
        raise ValueError(f"determinism_check is {_checks.not_among(check, ('default', 'none'))}")
    own = dict.fromkeys(_keywords.named(function) or keywords)
    unknown = [name for name in keywords if name not in own and name not in _CHECKPOINT_OPTIONS]
    options = (*_OWN_OPTIONS, *_CHECKPOINT_OPTIONS)
    if isinstance(function, torch.nn.Module):  # whose hooks may take names that its forward does not
        unknown = [name for name in unknown if difflib.get_close_matches(name, options, 1)]
    if unknown:
        name = getattr(function, "__name__", type(function).__name__)
        _keywords.check(f"checkpoint({name}, ...)", (*options, *own), unknown)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Run ``torch.utils.checkpoint``; the recomputation has the recipe of the first forward.

    PyTorch's own also works: a layer that is recomputed outside of an autocast runs under the recipe of its forward.
    This one also enters the autocast again, for code that asks for it and for compiled layers.

    Args:
        function: the function to recompute in the backward.
        use_reentrant: as in PyTorch; only the non-reentrant form compiles.
        distribute_saved_activations: must be False.
        tp_group: the group that Transformer Engine distributes saved activations over; not read.
        get_rng_state_tracker: returns an object with random states of its own, read and set by ``get_states()`` and
            ``set_states(states)``; the recomputation starts from the first forward's. Eager code only.
        **kwargs: for the function and, by PyTorch's names, for the checkpoint.
    Raises:
        NotImplementedError: ``distribute_saved_activations``, or a tracker in compiled code.
        TypeError: ``function`` or the tracker is not callable, or a keyword is unknown to function and checkpoint.
    """
    run = torch.utils.checkpoint.checkpoint
    compiling = torch.compiler.is_compiling()
    _checks.flags(use_reentrant=use_reentrant, distribute_saved_activations=distribute_saved_activations)
    if distribute_saved_activations or (compiling and get_rng_state_tracker is not None):
        option = "distribute_saved_activations" if distribute_saved_activations else "get_rng_state_tracker"
        raise NotImplementedError(
            f"checkpoint does not take {option}{'' if distribute_saved_activations else ' in compiled code'}; leave it "
            "out"
        )
    _checks.function("function", function, "a layer: checkpoint(layer, x)")
    if get_rng_state_tracker is not None:
        _checks.function("get_rng_state_tracker", get_rng_state_tracker, _TRACKER)
    if kwargs and not compiling:
        _check_keywords(function, kwargs)
    if compiling:
        return run(function, *args, use_reentrant=False, **kwargs)
    if use_reentrant:  # PyTorch's reentrant checkpoint takes no keywords for the function
        own = {name: value for name, value in kwargs.items() if name not in _CHECKPOINT_OPTIONS}
        kwargs = {name: value for name, value in kwargs.items() if name in _CHECKPOINT_OPTIONS}
        function = functools.partial(function, **own)
    values = THREAD.state.get()
    # another checkpoint around this one may be recomputed outside of its autocast
    known = not is_in_backward() or entered_in_backward()
    tracker = None if get_rng_state_tracker is None else _Tracked(get_rng_state_tracker())
    runs = itertools.count()

    @functools.wraps(function)
    def under_recipe(*inner_args: Any, **inner_kwargs: Any) -> Any:
        under = _under(values, next(runs) > 0, known)
        with under, contextlib.nullcontext() if tracker is None else tracker:
            return function(*inner_args, **inner_kwargs)

    return run(under_recipe, *args, use_reentrant=use_reentrant, **kwargs)


class _Tracked:
    """Entered by a forward, then by each of its recomputations, which begin with the random states of the forward."""

    def __init__(self, tracker: Any) -> None:
        if not hasattr(tracker, "get_states"):
            raise TypeError(
                f"get_rng_state_tracker returned {_checks.typed(tracker)}, without get_states(); pass {_TRACKER}"
            )
        self.tracker, self.first, self.after = tracker, None, None

    def __enter__(self) -> None:
        now = dict(self.tracker.get_states())
        if self.first is None:
            self.first = now
        else:
            self.after = now
            self.tracker.set_states(dict(self.first))

    def __exit__(self, *exception: Any) -> None:
        if self.after is not None:
            self.tracker.set_states(self.after)
