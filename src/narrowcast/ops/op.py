"""The kinds of operations: a basic one, and two that run several basic ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._keywords import refuse_keywords
from ..layers import DelayedLayer, parameter_device
from ..quantizers import Operand
from ..recipe import Mode, Recipe
from ..roles import QuantizerRole
from ..state import checked_recipe
from ..tensors import TensorOrQuantized
from ..upstream.modules import own_children
from .context import OperationContext
from .contract import ExtraTensors, FusibleOperation, Gradients, TensorsToSave
from .forward_forms import check_no_extra_io, something_returned
from .fuser import OperationFuser
from .handover import ScaledOperand
from .operands import operation_plan


class BasicOperation(FusibleOperation, DelayedLayer, framework_base=True):
    """One operation: a module with its own parameters that a fuser runs, alone or as part of a fused operation.

    It runs under the current autocast's recipe, else under its own ``recipe``.

    Attributes:
        num_extra_inputs: number of tensors it takes besides the main one; with any, it defines the fuser-level methods.
        num_extra_outputs: number of tensors it returns besides the main one; with any, likewise.

    Raises:
        TypeError: a class without forward is instantiated, or a class definition mixes the two forms or defines half of
            a pair.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _watcher: Any = None
    """What observes the operands of a linear operation, as ``inspect.watch`` sets it."""
    _passes_gradient: bool = False
    """Whether the operation in front quantizes the gradient of this one's output as that of its input."""
    _passes_input: bool = False
    """Whether the operation behind quantizes this one's input as its own."""
    _reads_codes: bool = False
    """Whether it takes the gradient of its output as rows in codes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._init_recipe_owner(None)
        self._init_delayed({})
        self._init_operation()

    def _init_operation(self) -> None:
        if not self._has_forward:
            raise TypeError(
                f"{type(self).__name__} has no forward: define op_forward_compute and op_forward_save_ctx, or "
                "op_forward; with extra inputs or outputs, the methods of the same names with the prefix fuser_"
            )
        # index of an extra input or output -> name of the channel that connects it
        self._input_channels: dict[int, str] = {}
        self._output_channels: dict[int, str] = {}
        self._channel_only_outputs: set[int] = set()
        self._captured = False

    # -- extra inputs and outputs ------------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, channel: str) -> None:
        """Take an extra input from a channel instead of from the caller.

        Args:
            index: which extra input.
            channel: name that an operation in front gives to one of its extra outputs.
        Raises:
            IndexError: no such extra input.
            RuntimeError: a fuser runs this operation already.
        """
        self._check_channel("input", index, self.num_extra_inputs)
        self._input_channels[index] = channel

    def set_extra_output_channel(self, index: int, channel: str, *, output_to_caller: bool = True) -> None:
        """Give an extra output to the later operations that take it from this channel.

        Args:
            index: which extra output.
            channel: name of the channel, one of a kind among operations that run together.
            output_to_caller: return it to the caller, too.
        Raises:
            IndexError: no such extra output.
            RuntimeError: a fuser runs this operation already.
        """
        self._check_channel("output", index, self.num_extra_outputs)
        self._output_channels[index] = channel
        if output_to_caller:
            self._channel_only_outputs.discard(index)
        else:
            self._channel_only_outputs.add(index)

    def _check_channel(self, kind: str, index: int, count: int) -> None:
        if self._captured:
            raise RuntimeError(
                f"{type(self).__name__} is run by a fuser already, so its channels are fixed; set them before it is "
                "put into a Sequential that runs"
            )
        if not 0 <= index < count:
            raise IndexError(f"{type(self).__name__} has {count} extra {kind}s; there is no number {index}")

    # -- quantizers --------------------------------------------------------------------------------------------------

    def num_quantizers(self, mode: Mode) -> int:
        """Return how many tensors it quantizes; ``mode``: "forward" or "backward"."""
        return 0

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole]:
        """Return the role of each of these tensors, for a custom recipe."""
        return [QuantizerRole() for _ in range(self.num_quantizers(mode))]

    def get_quantizer(self, mode: Mode, index: int) -> Operand | None:
        """Return how one tensor is quantized, in both directions, as the current recipe says; None without a recipe.

        Raises:
            IndexError: it has fewer quantizers.
        """
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise IndexError(
                f"{type(self).__name__} has {count} {mode} quantizers; there is no number {index}"
            )
        recipe = self._recipe_in_force()
        if recipe is None:
            return None
        plan = operation_plan(recipe, self)
        return (plan.forward if mode == "forward" else plan.backward)[index]

    def forward_arguments(self, requires_grad: bool, input_requires_grad: bool) -> dict[str, Any]:
        """Return what this forward reads of the recipe and of the operation's state, as keyword arguments of its
        methods.

        The fuser calls it once per forward, outside the autograd boundary, for operations that have quantizers.
        ``scales``, if it is there, is the state of delayed scaling: the context has it, too.
        """
        recipe = self._recipe_in_force()
        return {} if recipe is None else self._state_arguments(operation_plan(recipe, self))

    def _state_arguments(self, plan: Any) -> dict[str, Any]:
        """Return those of :meth:`forward_arguments` that a plan's delayed scaling reads."""
        if plan.delayed is None:
            return {}
        return {"scales": self._scales_of(("",), (plan,))[0]}

    def _add_delayed_state(self, name: str, device: torch.device | str | None) -> None:
        """Room for the state of quantizers that scale with delay: of an input, an output, and their gradients."""
        self._delayed_device = parameter_device(device)
        self._init_delayed({"": name})

    def _keep_state_of(self, recipe: Recipe) -> None:
        if self._stage_names:
            plan = operation_plan(recipe, self)
            self._keep_state("", plan.delayed)

    def _state_device(self, prefix: str) -> torch.device:
        own = next(self.parameters(), None)
        return self._delayed_device if own is None else own.device

    _registered: tuple[str, ...] = ()  # names of parameters

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name not in self._registered:
            self._registered = (*self._registered, name)

    def _views_of_parameters(self) -> list[Tensor]:
        """Return the replacements of parameters that the module has lost, in the order of registration.

        FSDP1 with ``use_orig_params=False`` takes them out of the module and leaves views as attributes.
        """
        views = [getattr(self, name, None) for name in self._registered]
        return [view for view in views if view is not None]

    def _apply(self, fn: Any, recurse: bool = True) -> BasicOperation:
        super()._apply(fn, recurse)
        if "_delayed_device" in self.__dict__:
            self._delayed_device = fn(torch.empty(0, dtype=torch.float32, device=self._delayed_device)).device
        return self

    def reset_recipe_state(self, *, recipe: Recipe | str | None) -> None:
        """Start delayed scaling again; ``recipe``: as if the last forward had run under it.

        Raises:
            TypeError: no recipe.
        """
        self._last_recipe = checked_recipe(recipe, "reset_recipe_state")
        self.end_step()
        self.reset_delayed_scaling()

    # -- forward and backward ----------------------------------------------------------------------------------------

    def op_forward(
        self, ctx: OperationContext, input_: TensorOrQuantized, **kwargs: Any
    ) -> TensorOrQuantized:
        """Run the forward in the legacy form; both halves of a split operation. Keyword arguments: as of compute."""
        check_no_extra_io(self)
        kwargs["requires_grad"] = ctx.requires_grad
        output, tensors_to_save = self.op_forward_compute(input_, **kwargs)
        if ctx.requires_grad:
            returned: Any = self.op_forward_save_ctx(ctx, input_, tensors_to_save, **kwargs)
            if returned is not None:
                raise something_returned(self, returned)
        return output

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        """Return the output and the tensors to save; pure.

        Args:
            input_: a tensor, or the operand that :meth:`get_input_quantizer` requested.
            prev_op_grad_output_quantizer: the previous operation's quantizer of the input's gradient.
            next_op_input_quantizer: the next operation's quantizer of the output; a plain tensor always works.
            requires_grad: whether there is a backward; without, nothing is to be saved.
            **kwargs: keyword arguments of the caller.
        """
        check_no_extra_io(self)
        raise NotImplementedError(f"{type(self).__name__} defines no op_forward_compute")

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: TensorOrQuantized,
        tensors_to_save: TensorsToSave,
        **kwargs: Any,
    ) -> None:
        """Put what compute returned on the context; the other arguments are those of compute."""
        check_no_extra_io(self)
        raise NotImplementedError(f"{type(self).__name__} defines no op_forward_save_ctx")

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        """Return (gradient of the input; None if it is not needed, gradients in the order of ``parameters()``)."""
        check_no_extra_io(self)
        raise NotImplementedError(f"{type(self).__name__} has no backward: define op_backward")

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: TensorOrQuantized, **kwargs: Any
    ) -> Any:
        if self._use_split_forward:
            return super().fuser_forward(basic_op_ctxs, input_, **kwargs)
        check_no_extra_io(self)
        (own,) = kwargs.pop("basic_op_kwargs")
        kwargs.pop("basic_op_extra_inputs")  # always empty
        return self.op_forward(basic_op_ctxs[0], input_, **kwargs, **own), [()]

    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: ExtraTensors,
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, ExtraTensors, list[TensorsToSave]]:
        if self.num_extra_inputs or self.num_extra_outputs:
            check_no_extra_io(self)
        output, tensors_to_save = self.op_forward_compute(input_, **kwargs, **basic_op_kwargs[0])
        return output, [()], [tensors_to_save]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[TensorsToSave],
        *,
        basic_op_extra_inputs: ExtraTensors,
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            check_no_extra_io(self)
        (ctx,), (saved,) = basic_op_ctxs, tensors_to_save
        returned: Any = self.op_forward_save_ctx(ctx, input_, saved, **kwargs, **basic_op_kwargs[0])
        if returned is not None:
            raise something_returned(self, returned)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: TensorOrQuantized,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> Gradients:
        if self.num_extra_inputs or self.num_extra_outputs:
            check_no_extra_io(self)
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def forward(self, input_: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Run the operation alone.

        Args:
            input_: main input.
            extra_inputs: as many as ``num_extra_inputs``.
            **kwargs: for the operation.
        Returns:
            the output; with extra outputs a tuple of it and them.
        """
        return OperationFuser([self], capture=False)(input_, *extra_inputs, basic_op_kwargs=[kwargs])


class FusedOperation(FusibleOperation, framework_base=True):
    """A shell that runs several basic operations at once; parameters and state belong to them.

    Every fusion creates it again, also while a compiler traces, so it keeps only the operations.

    Args:
        basic_ops: the operations, in order.
    Raises:
        ValueError: no operations.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        if not basic_ops:
            raise ValueError(f"{type(self).__name__} got no basic operations; give it the ones it runs")
        self._basic_ops = tuple(basic_ops)

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        return self._basic_ops

    def get_input_quantizer(self) -> Operand | None:
        return self._basic_ops[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Operand | None:
        return self._basic_ops[-1].get_grad_output_quantizer()


class CompositeOperation(FusibleOperation, nn.Module, framework_base=True):
    """A module that stands for a few consecutive basic operations, which a fuser runs instead.

    Args:
        basic_ops: the operations, in order; they are registered as ``basic_ops``.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        own_children(self)["basic_ops"] = nn.ModuleList(
            basic_ops
        )  # by hand: the name is taken by the property

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def basic_ops(self) -> Sequence[BasicOperation]:
        return own_children(self)["basic_ops"]  # type: ignore[return-value]  # a module: torch.func finds parameters by path

    def forward(
        self,
        input_: Any,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Run the operations; ``basic_op_kwargs``: keyword arguments, one dict per basic operation."""
        if unknown:
            refuse_keywords(self, unknown)
        return OperationFuser([self])(input_, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
