"""Contexts: values that an operation's forward leaves for its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..autograd import DelayedScales
from ..tensors import TensorOrQuantized
from .handover import ScaledOperand


class OperationContext:
    """Storage for the tensors that one basic operation's backward reads; other attributes may be set freely.

    The fuser sets, before the forward runs:

    Attributes:
        requires_grad: this operation has a backward.
        input_requires_grad: the gradient of its input is needed.
        prev_op_grad_output_quantizer: the previous operation's quantizer of that gradient; None for plain.
        scales: the state of delayed scaling; None without. The backward's is read anew.

    Tensors go only through :meth:`save_for_backward`. Other attributes must follow from the operation's attributes, its
    keyword arguments and the tensors' metadata. They must not hold sizes, which may be symbolic in a compiled graph;
    the backward reads sizes off the gradient and the saved tensors.
    """

    def __init__(
        self,
        requires_grad: bool = True,
        input_requires_grad: bool = True,
        prev_op_grad_output_quantizer: ScaledOperand | None = None,
        scales: DelayedScales | None = None,
    ) -> None:
        self.requires_grad = requires_grad
        self.input_requires_grad = input_requires_grad
        self.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        self.scales = scales
        self.to_save: tuple[TensorOrQuantized | None, ...] = ()

    def save_for_backward(self, *tensors: TensorOrQuantized | None) -> None:
        """Keep tensors for :attr:`saved_tensors` of the backward, instead of those of an earlier call."""
        self.to_save = tensors

    @property
    def saved_tensors(self) -> tuple[TensorOrQuantized | None, ...]:
        """The saved tensors; in the backward, restored."""
        return self.to_save

    def take(self) -> tuple[TensorOrQuantized | None, ...]:
        """Return :attr:`saved_tensors`, in an eager backward for the last time: what the caller drops is freed."""
        return self.saved_tensors

    if TYPE_CHECKING:  # whatever an operation keeps

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class RestoredContext:
    """One backward's view of a stored context, which stays as it is, with the tensors and state of the call."""

    def __init__(
        self,
        stored: OperationContext,
        saved: tuple[TensorOrQuantized | None, ...],
        wanted: ScaledOperand | None,
        scales: DelayedScales | None,
    ) -> None:
        self._stored, self.saved_tensors = stored, saved
        self.prev_op_grad_output_quantizer, self.scales = wanted, scales

    def take(self) -> tuple[TensorOrQuantized | None, ...]:
        saved, self.saved_tensors = self.saved_tensors, ()
        return saved

    def __getattr__(self, name: str) -> Any:
        if name == "_stored":  # only while a copy is being made
            raise AttributeError(name)
        return getattr(self._stored, name)
