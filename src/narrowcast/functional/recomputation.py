"""The forward that a recomputation repeats, and the scales that it reads, in eager code and graphs.

A recomputation reads the scales that its first run has read, and collects no amax. Both are decided when a layer, or an
operator in its graph, runs. PyTorch keeps an object for each forward that will be recomputed
(:mod:`..upstream.autograd`). What the first run reads is recorded on that object, and is freed with it. Checkpoints may
be nested: every run of the outer one makes the inner one again, which takes its scales from the outer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ..upstream.autograd import (
    after_backward,
    is_in_backward,
    records_gradients,
    running_checkpoints,
    running_functions,
    version_preserved,
)
from ..upstream.modules import is_frame_of


class Forward:
    """What the first run of a recomputed function has read.

    Attributes:
        kept: by address of a state's amax, the copies of its scales, in order.
        autocast: how deep the layers were in autocasts, at the least, and what they ran under there
            (:mod:`..layers.left_autocast`); None: no layer has run.
    """

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}
        self.autocast: tuple[int, Any] | None = None


class Run:
    """One run of a recomputed function.

    Args:
        forward: its first run's.
        rerun: this is not the first run.
        gradients: the first run will have a backward, though it records no gradients.
        around: the run of the checkpoint around this one.
    """

    def __init__(self, forward: Forward, rerun: bool, gradients: bool, around: Run | None) -> None:
        self.forward, self.rerun, self.around = forward, rerun, None if rerun else around
        self.kept = forward.kept
        self.repeats = rerun or (around is not None and around.repeats)
        self.gradients = gradients or (around is not None and around.gradients)
        self.shown: list[Tensor] = []
        self.counts: dict[int, int] = {}

    def collects(self, recorded: bool) -> bool:
        """Return whether amax counts: in the first run of all. ``recorded``: this run records gradients."""
        return not self.repeats and (recorded or self.gradients)

    def knows(self, amaxes: list[Tensor]) -> bool:
        """Return whether this is a first run, or one whose first run has read the scales of these states."""
        return not self.rerun or all(amax.data_ptr() in self.kept for amax in amaxes)

    def read(self, amaxes: list[Tensor], read: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the scales of some states: what the first run has read, or in a first run what ``read`` returns.

        Args:
            amaxes: of the states, by which these are known: their scales may be computed in a graph.
        Raises:
            RuntimeError: the first run has not read them.
        """
        keys = [amax.data_ptr() for amax in amaxes]
        taken = [self._take(key) for key in keys]
        if None not in taken:
            return [copy.clone() for copy in taken]  # type: ignore[union-attr]
        copies = read()
        for key, copy in zip(keys, copies):
            self._keep(key, copy.clone())  # the memory of a graph may be used again
        return copies

    def show(self, copies: list[Tensor]) -> int:
        """Return where the launches of a graph find what this run has read: known scales, one state's after another's.

        They are kept as long as the run, for the launches have the address alone.
        """
        known = [copy[0] if copy.dim() == 2 else copy for copy in copies]
        self.shown.append(torch.cat(known).clamp_(min=0.0))  # 0: nothing was seen
        return self.shown[-1].data_ptr()

    def _take(self, key: int) -> Tensor | None:
        if self.rerun:
            if key not in self.kept:
                raise RuntimeError(UNKNOWN_FORWARD)
            at = self.counts[key] = self.counts.get(key, -1) + 1
            return self.kept[key][min(at, len(self.kept[key]) - 1)]
        found = None if self.around is None else self.around._take(key)
        if found is not None:
            self.kept.setdefault(key, []).append(found)
        return found

    def _keep(self, key: int, copy: Tensor) -> None:
        self.kept.setdefault(key, []).append(copy)
        if self.around is not None:
            self.around._keep(key, copy)


UNKNOWN_FORWARD = (
    "a layer under delayed scaling runs in a backward, and which forward it repeats is not known: that forward did not "
    "pass here, or the layer was moved since; recompute with torch.utils.checkpoint(use_reentrant=False) or "
    "narrowcast.checkpoint, compile the function around the checkpoint, or use a recipe without delayed scaling"
)


def run_now() -> Run | None:
    """Return the innermost recomputed function that runs; None outside any.

    Raises:
        UpstreamError: this release keeps a checkpoint's forward in a way that is not known.
    """
    runs = running_checkpoints()
    of_functions = running_functions()
    if of_functions:
        # a function's first run records no gradients, so no other checkpoint is inside it
        reruns = [(owner, run) for owner, run in of_functions if run is not None]
        runs = reruns + runs + [(owner, run) for owner, run in of_functions if run is None]
    found: Run | None = None
    for owner, run in runs:
        known = vars(owner).setdefault("_narrowcast_runs", {})
        if run not in known:
            forward = known[None].forward if None in known else Forward()
            gradients = hasattr(owner, "next_functions") and records_gradients(owner)
            known[run] = Run(forward, run is not None, gradients, found)
        found = known[run]
    return found


class _Running(threading.local):
    """The models whose forward runs in eager code of this thread and that renew the scales of their layers.

    A model is known by the frame that calls its forward, because no hook runs after an interrupt (Ctrl-C). The frame is
    known by its address and code: a reference to it would keep its callers' variables after an interrupt, and with them
    a checkpoint in force.
    """

    def __init__(self) -> None:
        self._frames: dict[str, list[tuple[int, CodeType]]] = {}  # the outermost call first

    def enter(self, root: str, frame: FrameType) -> None:
        """Note that the forward of ``root`` starts in a frame."""
        for known in list(self._frames):
            self.runs(known)
        self._frames.setdefault(root, []).append((id(frame), frame.f_code))

    def leave(self, root: str) -> None:
        """Forget the innermost forward of ``root``."""
        frames = self._frames.get(root)
        if frames:
            frames.pop()
            self.runs(root)

    def runs(self, root: str) -> bool:
        """Return whether a forward of ``root`` runs; forget those that an exception ended."""
        frames = self._frames.get(root)
        if frames is None:
            return False
        while frames and not is_frame_of(*frames[-1], "_renews_as", root):
            frames.pop()
        if not frames:
            del self._frames[root]
        return bool(frames)


RUNNING = _Running()


# By address: an amax, and what it holds in truth. What a recomputation or a forward without gradients collects is in
# it for as long as its graph runs.
ASIDE: dict[int, tuple[Tensor, Tensor]] = {}


def set_aside(amaxes: Sequence[Tensor]) -> None:
    """Remember what these hold: what is written to them from now on does not count."""
    new = [amax for amax in amaxes if amax.data_ptr() not in ASIDE]
    for amax, before in zip(new, [amax.clone() for amax in new]):
        ASIDE[amax.data_ptr()] = (amax, before)


def put_back(amaxes: Sequence[Tensor]) -> None:
    """End what :func:`set_aside` began; by whatever reads or changes the same amax next."""
    if ASIDE:
        _write_back([ASIDE.pop(amax.data_ptr(), None) for amax in amaxes])


def _put_all_back() -> None:
    _write_back([ASIDE.pop(address, None) for address in list(ASIDE)])


def _write_back(found: list[tuple[Tensor, Tensor] | None]) -> None:
    for amax, before in [pair for pair in found if pair is not None]:
        with torch.inference_mode(amax.is_inference()), torch.no_grad(), version_preserved([amax]):
            amax.copy_(before)


# By address of the amax that a forward collects: what fits first scales of weights to the weights as they are. It is of
# layers in graphs, until they have begun: a graph may run again after a weight was written, without the host in the
# layer. It takes the graph's scales, by the same addresses, and whether the run counts; it returns whether it is done.
FIRST: dict[int, Callable[[dict[int, Tensor], bool], bool]] = {}


def fit_first(scales: Sequence[Tensor], amaxes: Sequence[Tensor], counts: bool) -> None:
    """Fit the first scales in the states of a graph that runs; ``counts``: it collects."""
    if FIRST:
        by_amax = {amax.data_ptr(): scale for amax, scale in zip(amaxes, scales)}
        for key in by_amax:
            fit = FIRST.get(key)
            if fit is not None and fit(by_amax, counts):
                FIRST.pop(key, None)


def read_in_graph(
    scales: list[Tensor],
    amaxes: list[Tensor],
    collects: list[bool],
    recorded: bool,
    read: Callable[[], list[Tensor]],
) -> list[Tensor]:
    """Return the scales that the forward of a graph reads: ``read()``, or what the forward that it repeats has read.

    Args:
        scales, amaxes: of the layers in the graph, by direction.
        collects: whether the operands of the forward are collected in an amax.
        recorded: the graph records gradients.
        read: returns copies of the scales, renewed first where that is up to the layers.
    Raises:
        RuntimeError: the graph runs in a backward, and which forward it repeats is not known.
    """
    put_back(amaxes)
    run, in_backward = run_now(), is_in_backward()
    if run is None and in_backward and recorded:
        raise RuntimeError(UNKNOWN_FORWARD)
    counts = recorded if run is None else run.collects(recorded)
    if not in_backward:
        fit_first(scales, amaxes, counts)
    copies = read() if run is None else run.read(amaxes, read)
    if not counts:
        set_aside([amax for amax, of_forward in zip(amaxes, collects) if of_forward])
        if in_backward:
            after_backward(_put_all_back)
    return copies
