"""Operations: small modules that a fuser runs in a row, and shells that run several of them at once.

An operation splits its forward in two. *Compute* is pure: it gets tensors, returns tensors, and leaves the operation as
it is. *Save* gets what compute returned and only puts it on a context; it never looks at values, since a compiler runs
it on tensors without any. There are two levels of the same pair:

    operation level   op_forward_compute, op_forward_save_ctx; op_backward           one input, one output
    fuser level       fuser_forward_compute, fuser_forward_save_ctx; fuser_backward  extra inputs and outputs, several
                                                                                     basic operations at once

The legacy form of either pair is one method with a context, ``op_forward`` or ``fuser_forward``.

A class defines one form; what a subclass defines last is what runs.

What operations hand each other is a tensor, or a ``QuantizedTensorStorage`` where the receiver says by
:meth:`FusibleOperation.get_input_quantizer` (forward) or :meth:`FusibleOperation.get_grad_output_quantizer` (backward)
how it wants one and the giver can make it; such a receiver accepts both. Both have their leading dims in ``shape``; the
buffers of a storage are those of the (M, K) matrix of rows (:class:`~.handover.ScaledOperand`). A storage belongs to
its receiver, who may empty it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from torch import Tensor

from ..quantizers import Operand
from ..recipe import Mode
from ..roles import QuantizerRole
from ..tensors import TensorOrQuantized
from .context import OperationContext
from .forward_forms import check_one_form, check_pairs, form_defined_by
from .handover import ScaledOperand

TensorsToSave = tuple[TensorOrQuantized | None, ...]
"""What one basic operation saves; empty without a backward."""
ExtraTensors = list[tuple[Any, ...]]
"""Extra inputs, extra outputs or their gradients: one tuple per basic operation."""
ParameterGradients = list[tuple[Tensor | None, ...]]
"""One tuple per basic operation, in the order of its ``parameters()``."""
Gradients = tuple[TensorOrQuantized | None, ParameterGradients, ExtraTensors]
"""Gradients of the main input (None if it is not needed), the parameters and the extra inputs."""


class BasicOperationLike(Protocol):
    """A :class:`~narrowcast.ops.BasicOperation`, as what is below it reads one."""

    num_extra_inputs: int
    num_extra_outputs: int
    _input_channels: dict[int, str]
    _output_channels: dict[int, str]
    _channel_only_outputs: set[int]
    _passes_gradient: bool
    _passes_input: bool

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole]: ...


class FusibleOperation:
    """Anything that a fuser can run: a basic operation, or several at once."""

    _framework_base: ClassVar[bool] = True
    _use_split_forward: ClassVar[bool] = True
    """Whether compute and save run, or one method with contexts: what the class defines last."""
    quantizes_output: bool = False
    """Whether the forward hands over quantized data where the next operation asks for it."""
    quantizes_grad_input: bool = False
    """Whether the backward hands over a quantized gradient where the previous operation asks for it."""

    _has_forward: ClassVar[bool] = False
    _prepares_forward: ClassVar[bool] = False
    """Whether a class defines :meth:`pre_fuser_forward`."""

    _values: ClassVar[Callable[[Any], Any] | None] = None
    """Reads off an operation all that its methods follow from besides their arguments, with its class; else None."""

    def __init_subclass__(
        cls, framework_base: bool = False, values: tuple[str, ...] | None = None, **kwargs: Any
    ) -> None:
        """
        Args:
            values: hashable attributes. With its parameters and arguments they determine all that an operation does,
                so that lists of such operations are replayed. A class states them for itself, not for its subclasses.
        """
        super().__init_subclass__(**kwargs)
        cls._framework_base = framework_base
        cls._values = None if values is None else attrgetter("__class__", *values)
        if framework_base:
            return
        check_one_form(cls)
        check_pairs(cls)
        defined = next((form for base in cls.__mro__ if (form := form_defined_by(base)) is not None), None)
        cls._has_forward = defined is not None
        cls._use_split_forward = defined != "legacy"
        cls._prepares_forward = cls.pre_fuser_forward is not FusibleOperation.pre_fuser_forward

    @property
    def is_fused_op(self) -> bool:
        """Whether it stands for the basic operations in :attr:`basic_ops`."""
        return False

    @property
    def basic_ops(self) -> Sequence[BasicOperationLike]:
        """The basic operations it runs, in order."""
        if self.is_fused_op:
            raise NotImplementedError(f"{type(self).__name__} must say which basic_ops it runs")
        return (self,)  # type: ignore[return-value]

    def pre_first_fuser_forward(self) -> None:
        """Prepare before the first forward of a fuser; not called in compiled code."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Prepare before each forward, outside the autograd boundary; must not change anything in compiled code."""

    def get_input_quantizer(self) -> Operand | None:
        """Return the first operation's quantizer of its input, with its own state; None for a plain tensor."""
        return None

    def get_grad_output_quantizer(self) -> Operand | None:
        """Return the last operation's quantizer of its output's gradient; None for a plain tensor."""
        return None

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: TensorOrQuantized, **kwargs: Any
    ) -> tuple[TensorOrQuantized, ExtraTensors]:
        """Compute the forward of the legacy form: (output, extra outputs, one tuple per basic operation).

        Of a split operation it runs both halves. Args: contexts of the basic operations, which know about
        ``requires_grad``, and the others of :meth:`fuser_forward_compute`.
        """
        kwargs["requires_grad"] = any(ctx.requires_grad for ctx in basic_op_ctxs)
        output, extra_outputs, tensors_to_save = self.fuser_forward_compute(input_, **kwargs)
        if kwargs["requires_grad"]:
            self.fuser_forward_save_ctx(basic_op_ctxs, input_, tensors_to_save, **kwargs)
        return output, extra_outputs

    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: ExtraTensors,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        basic_op_kwargs: list[dict[str, Any]],
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, ExtraTensors, list[TensorsToSave]]:
        """Output, extra outputs and tensors to save, the latter two with one tuple per basic operation; pure.

        Args:
            input_: main input.
            basic_op_extra_inputs: extra inputs, one tuple per basic operation.
            prev_op_grad_output_quantizer: the previous operation's quantizer of the input's gradient.
            next_op_input_quantizer: the next operation's quantizer of the output.
            basic_op_kwargs: keyword arguments, one dict per basic operation.
            requires_grad: whether any of the basic operations has a backward; without, nothing is to be saved.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: define fuser_forward_compute and fuser_forward_save_ctx, or "
            "fuser_forward"
        )

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[TensorsToSave],
        **kwargs: Any,
    ) -> None:
        """Put what compute returned on the contexts; the other arguments are those of compute."""
        raise NotImplementedError(f"{type(self).__name__} defines no fuser_forward_save_ctx")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: TensorOrQuantized,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> Gradients:
        """Return gradients.

        Args:
            basic_op_ctxs: contexts of the basic operations, with ``saved_tensors``.
            grad_output: gradient of the main output.
            basic_op_grad_extra_outputs: those of the extra outputs, one tuple per basic operation; None counts as zero.
        Returns:
            (gradient of the main input; None if it is not needed, gradients of the parameters in the order of
            ``parameters()``, gradients of the extra inputs), the latter two with one tuple per basic operation.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no backward: define fuser_backward, or op_backward in a basic operation"
        )
