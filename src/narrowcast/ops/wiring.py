"""Extra inputs and outputs of a list of operations: which comes from where, and which goes where."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from .contract import BasicOperationLike


class _Marked(torch.autograd.Function):
    """A tensor that needs a gradient as another one does; what is made of it takes none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _mark(x: Tensor, anchor: Tensor) -> Tensor:
    """Return ``x.detach().requires_grad_()``, which PyTorch 2.11 cannot trace."""
    with torch.enable_grad():
        return _Marked.apply(x.detach(), anchor)


@dataclass(frozen=True)
class Outlet:
    """One extra output: which one it is, its channel, and whether it leaves the fuser, and to the user."""

    op: int
    index: int
    channel: str | None
    to_caller: bool
    to_user: bool


@dataclass(frozen=True)
class Inlet:
    """One extra input: which one it is, and its channel. ``position``: among those that the caller gives, else -1."""

    op: int
    index: int
    channel: str | None
    position: int


@dataclass(frozen=True)
class Wiring:
    """Extra inputs and outputs of a list of basic operations."""

    inlets: tuple[Inlet, ...]
    outlets: tuple[Outlet, ...]
    from_caller: int

    def inputs_of(
        self, op: int, channels: dict[str, Tensor], given: Sequence[Tensor], run: Sequence[int]
    ) -> tuple[Tensor | None, ...]:
        """Return extra inputs of one basic operation; None for one that comes from an operation of the same fused
        ``run``.

        Raises:
            RuntimeError: a fused operation in front gave None if others read.
        """
        return tuple(
            given[inlet.position] if inlet.position >= 0 else self._from_channel(inlet, channels, run)
            for inlet in self.inlets
            if inlet.op == op
        )

    def _from_channel(self, inlet: Inlet, channels: dict[str, Tensor], run: Sequence[int]) -> Tensor | None:
        if inlet.channel in channels:
            return channels[inlet.channel]
        source = next(out.op for out in self.outlets if out.channel == inlet.channel)
        if source not in run:
            raise RuntimeError(
                f"operation {inlet.op} reads channel {shown(inlet.channel)}, for which the previous fused operation "
                "returned None; it may do so only where it holds all readers"
            )
        return None

    def outputs_of(self, op: int) -> list[Outlet]:
        """Return extra outputs of one basic operation."""
        return [outlet for outlet in self.outlets if outlet.op == op]

    def distribute(
        self,
        op: BasicOperationLike,
        number: int,
        outputs: Sequence[Tensor | None],
        channels: dict[str, Tensor],
        to_caller: list[Tensor],
        anchor: Tensor | None,
    ) -> None:
        """Give the extra outputs of one basic operation to its channels and to the caller.

        Args:
            anchor: a tensor that needs a gradient, if the operation has a backward. Autograd marks nothing here, since
                nothing is recorded, so a channel is marked for operations that ask what they get.
        """
        outlets = self.outputs_of(number)
        if len(outputs) != len(outlets):
            raise wrong_count(op, "the forward", "extra outputs", outputs, len(outlets))
        for outlet, output in zip(outlets, outputs):
            if output is None and (outlet.channel is None or outlet.to_caller):
                raise RuntimeError(
                    f"the forward of {type(op).__name__} returned None as extra output {outlet.index}, which the "
                    "caller gets; return a tensor"
                )
            if output is None:  # a fused operation that holds the readers of the channel
                continue
            if outlet.channel is not None:
                unmarked = output.is_floating_point() and not output.requires_grad
                channels[outlet.channel] = output if anchor is None or not unmarked else _mark(output, anchor)
            if outlet.to_caller:
                to_caller.append(output)

    def collect(
        self,
        op: BasicOperationLike,
        number: int,
        grads: Sequence[Any],
        to_caller: list[Tensor | None],
        grad_extra: dict[tuple[int, int], Tensor],
    ) -> None:
        """Give the gradients of one basic operation's extra inputs to the caller, or add them where they came from."""
        inlets = [inlet for inlet in self.inlets if inlet.op == number]
        if len(grads) != len(inlets):
            raise wrong_count(op, "the backward", "gradients of extra inputs", grads, len(inlets))
        for inlet, grad in zip(inlets, grads):
            if inlet.position >= 0:
                to_caller[inlet.position] = grad
            elif grad is not None:
                source = next((out.op, out.index) for out in self.outlets if out.channel == inlet.channel)
                there = grad_extra.get(source)
                grad_extra[source] = grad if there is None else there + grad


def wire(
    basic_ops: Sequence[BasicOperationLike], incoming: Collection[str], outgoing: Collection[str]
) -> Wiring:
    """Return which extra input comes from where, and which extra output goes where.

    Raises:
        ValueError: a channel that nothing in front gives, or that two operations give.
    """
    inlets: list[Inlet] = []
    outlets: list[Outlet] = []
    given: list[str] = []
    from_caller = 0
    for number, op in enumerate(basic_ops):
        for index in range(op.num_extra_inputs):
            channel = op._input_channels.get(index)
            inside = channel in given
            if channel is not None and not inside and channel not in incoming:
                raise ValueError(
                    f"extra input {index} of {type(op).__name__} (operation {number}) comes from channel "
                    f"{shown(channel)}, which no operation in front of it gives; call set_extra_output_channel on an "
                    "earlier one"
                )
            inlets.append(Inlet(number, index, channel, -1 if inside else from_caller))
            from_caller += not inside
        for index in range(op.num_extra_outputs):
            channel = op._output_channels.get(index)
            if channel is not None:
                if channel in given:
                    raise ValueError(
                        f"extra output {index} of {type(op).__name__} (operation {number}) goes to channel "
                        f"{shown(channel)}, which an earlier operation gives already; use another name"
                    )
                given.append(channel)
            to_user = index not in op._channel_only_outputs
            outlets.append(Outlet(number, index, channel, to_user or channel in outgoing, to_user))
    return Wiring(tuple(inlets), tuple(outlets), from_caller)


def wrong_count(op: Any, direction: str, what: str, returned: Sequence[Any], count: int) -> RuntimeError:
    return RuntimeError(f"{direction} of {type(op).__name__} returned {len(returned)} {what}, it has {count}")
