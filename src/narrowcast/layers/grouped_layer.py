"""``GroupedLinearLayer``: base of layers with one linear layer per group of rows, of which the groups are a stage.

All groups together are one stage of :class:`LinearLayer`: one plan, one set of arguments, one operator for the
weights of all, one grouped GEMM instead of a GEMM. Their scales, amax and histories are buffers with a slot for each
group. What differs is the parameters: one for all groups or one for each. Those of each are views of one allocation
until they leave it (``to_empty``, a load that assigns), so that operators read all of them in
place; where they are somewhere else they are gathered first. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import a_kind, flags, positive, shape_of, shown, text
from .._tracing import can_return_quantized, has_addresses, host_reads, is_known
from ..autograd import DelayedScales, LinearFwdArgs, LinearWgrad
from ..autograd.groups import Groups, quantize_weights
from ..functional import join_weights, splits_on_device
from ..quantizers import Operand, OperandBuffers, buffers_of
from ..recipe import LinearPlan, Recipe
from ..tensors import (
    GroupedTensor,
    QuantizedTensor,
    QuantizedTensorStorage,
    grouped_layout,
    grouped_storage_of,
    is_coded,
    plain,
    storage_of,
)
from ..tensors.storage import resolve_storage_class
from ..upstream.fsdp import is_distributed
from ..upstream.modules import own_parameters
from ..upstream.tensors import base_of
from .linear_layer import LinearLayer, Stage
from .parameters import (
    begun_main_grads,
    checked_input,
    layer_name,
    main_grad_of,
    parameter_device,
    quantize_parameter,
)
from .tensor_parallel import Parallel, Split, mark_partition

FEW_ROWS = 1024
"""Rows of an average group up to which its weight is quantized once for both of its GEMMs. To read it once more would
take the backward a tenth of the time of all GEMMs there, and ever more with fewer rows; a byte per element is saved."""


def plan_for_rows(plan: LinearPlan, rows: int, groups: int) -> LinearPlan:
    """Return the plan of a grouped layer for as many rows. Compiled code that does not know them keeps the plan."""
    if plan.weight_once is None:
        return plan
    return plan.weight_once if is_known(rows <= FEW_ROWS * groups) else plan


class GroupedLinearLayer(LinearLayer):
    """Base of the layers with one linear layer per group; arguments as of ``nn.GroupedLinear``.

    All groups are one stage, of which each tensor type has ``num_gemms`` slots. Weights and biases are each one
    parameter, ``weight`` (G, N, K) and ``bias`` (G, N), or one per group, ``weight0`` (N, K) and so on.
    """

    _module_type = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
        recipe: Recipe | str | None = None,
        parallel: Parallel | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        positive(num_gemms=num_gemms, in_features=in_features, out_features=out_features)
        flags(bias=bias, single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias)
        flags(fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        text(name=name)
        parallel = parallel or Parallel({})
        in_features, (out_features,) = parallel.local_features(in_features, [out_features])
        if bias and parallel.size > 1:
            raise ValueError(
                f"bias=True with tp_size={parallel.size}; GroupedLinear has no tensor-parallel bias, pass bias=False"
            )
        place, single = parameter_device(device), (single_grouped_weight, single_grouped_bias)
        super().__init__(
            name,
            (Stage("", name or "", "weight", "bias", init_method),),
            place,
            recipe=recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            parts={
                kind: [f"{kind}{group}" for group in range(num_gemms)]
                for kind, whole in zip(("weight", "bias"), single)
                if not whole
            },
            parallel=parallel._replace(modes={}),  # nothing is communicated here
        )
        self._groups = self.num_gemms = num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.parallel_mode, self._tp_group = bias, parallel.mode, parallel.group
        self.single_grouped_weight, self.single_grouped_bias = single
        if self._init_recipe is not None:
            self._stored_as(self._stages[0])
        # one allocation for all groups: operators then read the parameters of all groups without gathering them
        sizes = (num_gemms, out_features, in_features)
        self._add_groups("weight", torch.empty(sizes, dtype=dtype, device=place))
        self._add_groups("bias", torch.empty(sizes[:2], dtype=dtype, device=place) if bias else None)
        if place.type != "meta" or (self._init_recipe is not None and not self.single_grouped_weight):
            self.reset_parameters()
        self._prepare_for_recipe()

    # -- parameters --------------------------------------------------------------------------------------------------

    def _add_groups(self, kind: str, values: Tensor | None) -> None:
        for group, name in enumerate(self._names_of(kind)):
            own = values[group] if values is not None and kind in self._parts else values
            self.register_parameter(name, None if own is None else nn.Parameter(own))
        if (
            kind not in self._parts
        ):  # one parameter for all: those of the groups are absent, as Transformer Engine's
            for group in range(self.num_gemms):
                self.register_parameter(f"{kind}{group}", None)

    def _mark_parameter(self, name: str, parameter: Tensor) -> None:
        """Mark the split dim, which is never the dim of the groups."""
        split = self._split_of(name)
        if split is not None:
            mark_partition(parameter, split.dim)  # type: ignore[arg-type]

    def _split_of(self, name: str) -> Split | None:
        column, is_weight = self.parallel_mode == "column", name.startswith("weight")
        parameter = own_parameters(self).get(name)
        if parameter is None or not (column or (self.parallel_mode == "row" and is_weight)):
            return None
        dim = parameter.dim() - (2 if column and is_weight else 1)
        return Split(dim, self._tp_group, self.tp_size, "tensor")

    def extra_repr(self) -> str:
        """Return sizes and recipe, as printed by the module."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return self._with_recipe(f"num_gemms={self.num_gemms}", sizes, f"bias={self.use_bias}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weights, biases and state where they are; on the meta device nothing."""
        for kind in ("weight", "bias"):
            self._gather(kind)
        self._reset_weights(self._stages[0])
        for bias in self._parts_of("bias"):
            bias.zero_()
        self._reset_state()

    def _gather(self, kind: str) -> None:
        """Put the parameters of all groups into one allocation again, after ``to_empty`` separated them."""
        parts = self._parts_of(kind)
        all_plain = all(type(part.data) is Tensor for part in parts)
        if all_plain and len({part.untyped_storage().data_ptr() for part in parts}) > 1:
            for part, own in zip(parts, parts[0].new_empty(len(parts), *parts[0].shape).unbind(0)):
                part.data = own

    def _reset_weights(self, stage: Stage) -> None:
        weights, quantized = self._parts_of("weight"), self._init_recipe is not None
        if quantized and not self.single_grouped_weight:
            weights = [torch.zeros_like(w) for w in weights]  # plain, and sharded as they are
        values: Any = weights
        if self.single_grouped_weight:  # group by group, so that both forms start from the same values
            whole: Any = weights[0]
            if quantized:
                whole = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
            if hasattr(whole, "to_local"):  # sharded, where PyTorch draws for all ranks together
                values = [whole] if stage.init_method is None else whole.to_local().unbind(0)
            else:
                values = whole.unbind(0)
        for value in values:
            self._draw(stage, value)
        if quantized and not (self.single_grouped_weight and weights[0].is_meta):
            self._quantize_weight(weights if not self.single_grouped_weight else [whole])

    @torch.no_grad()
    def make_grouped_weights(self, defer_init: bool = False) -> None:
        """Quantize the weights under ``quantized_model_init``.

        The constructor does that. This is for weights that have become plain, as by ``load_state_dict(assign=True)``.

        Args:
            defer_init: leave it as it is, as on the meta device.
        """
        if defer_init or self._init_recipe is None:
            return
        weights = self._parts_of("weight")
        if not (weights[0].is_meta or isinstance(weights[0], (GroupedTensor, QuantizedTensor))):
            self._quantize_weight([weight.detach() for weight in weights])

    def _quantize_weight(self, values: list[Tensor]) -> None:
        """Register the quantization of all weights, one (G, N, K) or G of (N, K), instead of the parameters."""
        quantizer = self._stored_as(self._stages[0])
        if self.single_grouped_weight and is_distributed(self.weight):
            raise RuntimeError(
                f"FSDP shards {layer_name(self)}, but not the one tensor that its groups are to be "
                "quantized into; use single_grouped_weight=False, or make it without quantized_model_init"
            )
        for name, value in zip(self._names_of("weight"), values, strict=True):
            held: Any = own_parameters(self)[name]
            if is_distributed(value):  # FSDP2 has the parameter
                held.copy_(value)
                continue
            parameter = quantize_parameter(value, quantizer, self._init_preserve, held.requires_grad)
            self.register_parameter(name, parameter)

    def _takes_rows(self, storage_name: str) -> bool:
        # the backward transposes groups in common buffers, not groups in separate ones
        self._stored_rowwise = grouped_layout(storage_name) != "split"
        return self._stored_rowwise

    def _makes_columns(self, weight: Any) -> bool:
        if self._stored_rowwise or not isinstance(weight, (GroupedTensor, QuantizedTensor)):
            return self._stored_rowwise
        if isinstance(weight, GroupedTensor):
            name, made_by = weight.storage_name, grouped_storage_of(weight).quantizer
            columns_follow = resolve_storage_class(name)(quantizer=made_by, fake_dtype=weight.dtype)._turns()
        else:
            name, columns_follow = weight._BARE_NAME, super()._makes_columns(weight)
        return columns_follow and grouped_layout(name) != "split"

    # -- what a forward reads ----------------------------------------------------------------------------------------

    @property
    def wants_wgrad(self) -> bool:
        """Whether some weight has a gradient, so that something of the input is saved."""
        return any(weight.requires_grad for weight in self._parts_of("weight"))

    def _grouped_args(
        self,
        plan: LinearPlan,
        scales: DelayedScales,
        dtype: torch.dtype,
        needs_bias: bool,
        covered: bool,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        described: bool = False,
    ) -> tuple[LinearFwdArgs, Groups]:
        """Return the autograd function's arguments besides its operands.

        Args:
            dtype: of the input; the others as in the records.
            described: the operands are not read, only which ones there are and what quantized them.
        """
        weights = self._parts_of("weight")
        made = buffers_of(weights[0]) if described and isinstance(weights[0], QuantizedTensor) else None
        args = self._fwd_args(
            self._stages[0], plan, dtype, weights[0], None, is_first_microbatch, scales, made, needs_bias
        )
        split = not self.single_grouped_weight, not self.single_grouped_bias
        shape = self.num_gemms, self.out_features, self.in_features
        return args, Groups(*shape, *split, covered, out, dgrad_out)

    def _workspace(
        self,
        stage: Stage,
        operand: Operand,
        weight: Any,
        is_first_microbatch: bool | None,
    ) -> OperandBuffers:
        weights = self._parts_of("weight")
        if isinstance(weight, (GroupedTensor, QuantizedTensor)):
            check_format(self, weight, operand)
            return (
                grouped_buffers_of(weight)
                if isinstance(weight, GroupedTensor)
                else joined_buffers_of(weights)
            )
        made_from = [weight.detach() for weight in weights]
        kept = None if is_first_microbatch else self._kept_weight("weight", operand, made_from)
        if kept is not None:
            return kept
        buffers = quantize_weights(made_from, operand)
        return self._keep_weight("weight", operand, made_from, buffers)

    def _wgrad(self, name: str, is_first_microbatch: bool | None) -> LinearWgrad:
        """Return the weight gradients like a linear layer's, in lists.

        Raises:
            RuntimeError: a ``main_grad`` is missing, or some are to be overwritten and some are not.
            ValueError: a ``main_grad`` of another shape than its weight, neither fp32 nor bf16.
        """
        if not self.fuse_wgrad_accumulation:
            return super()._wgrad(name, is_first_microbatch)
        owner, overwrites, wanted = layer_name(self), set(), []
        main_grads: list[Tensor | None] = []
        dummies: list[str] = []
        for part in self._names_of(name):
            weight, main_grad, dummy = getattr(self, part), None, ""
            if weight.requires_grad:
                main_grad, overwrite, dummy = main_grad_of(weight, part, owner)
                overwrites.add(overwrite)
                wanted.append(weight)
                if main_grad.shape != weight.shape or main_grad.dtype not in (torch.float32, torch.bfloat16):
                    raise ValueError(
                        f"main_grad of parameter {shown(part)} is {main_grad.dtype} {shape_of(main_grad)}; assign "
                        f"torch.float32 or torch.bfloat16 {shape_of(weight)}"
                    )
            main_grads.append(main_grad)
            dummies.append(dummy)
        if len(overwrites) > 1:
            raise RuntimeError(
                f"overwrite_main_grad is set on some weights of {owner} only; set it on all or on none"
            )
        store = self.wgrad_stores.get(name)
        ticket = None if store is None else store.ticket
        begins = begun_main_grads(wanted, is_first_microbatch)
        return LinearWgrad(main_grads, True in overwrites, dummies, store, ticket, *begins)

    # -- checks ------------------------------------------------------------------------------------------------------

    def _checked_input(self, inp: Tensor, weights: Sequence[Any], features: int | None = None) -> Tensor:
        """Return the input, cast where torch.autocast says so; ``features``: its last dim, or that of the weights."""
        weight: Any = weights[0] if weights else None
        for at, other in enumerate(weights):
            if other.shape != weight.shape or other.shape[-1] != self.in_features:
                raise ValueError(
                    f"weight{at} has shape {shape_of(other)}; all groups have one shape, the last dim of which is "
                    f"in_features={self.in_features}"
                )
        coded = can_return_quantized() and is_coded(inp)
        if isinstance(inp, (QuantizedTensorStorage, GroupedTensor)) and not coded:
            raise TypeError(
                f"input is {a_kind(inp)}; GroupedLinear quantizes its input itself, pass a plain tensor, or, "
                "in eager code, rows in MXFP8 or in blocks of 128 of a row"
            )
        return checked_input(
            self, inp, "in_features", weight, features or self.in_features, quantized_as_it_is=coded
        )

    def _checked_splits(
        self, splits: Sequence[int] | Tensor, x: Tensor, label: str = "m_splits"
    ) -> tuple[Tensor, bool]:
        """Return the splits on the device of ``x``; whether the host knows that they sum to its rows."""
        known: list[int] | None = None
        if not isinstance(splits, Tensor):
            if not hasattr(splits, "__len__") or not all(
                isinstance(rows, int) or hasattr(rows, "__index__") for rows in splits
            ):
                raise TypeError(
                    f"{label} is {shown(splits)}; give the rows of each group as a list of ints, or an int32 or "
                    "int64 tensor"
                )
            known = list(splits)
        elif splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{label} is {splits.dtype} of shape {shape_of(splits)}; use torch.int32 or torch.int64 "
                f"({self.num_gemms},)"
            )
        elif host_reads(splits):
            known = splits.tolist()
        length = splits.shape[0] if isinstance(splits, Tensor) else len(splits)
        if length != self.num_gemms:
            raise ValueError(
                f"{label} has {length} entries; give one for each of the {self.num_gemms} groups"
            )
        if known is not None:
            total = sum(known)
            if any(split < 0 for split in known) or total > x.shape[0]:
                raise ValueError(
                    f"{label} is {known}; use non-negative numbers whose sum is at most the {x.shape[0]} rows"
                )
            return splits_on_device(x.detach(), known), total == x.shape[0]
        return splits.to(x.device, non_blocking=True), False  # type: ignore[union-attr]

    # -- state dict --------------------------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Either form of the parameters loads into either form; another number of groups is a size mismatch."""
        converted, errors = dict(state_dict), args[-1]
        for kind in ("weight", "bias"):
            single, whole = kind not in self._parts, converted.get(prefix + kind)
            parts = [converted.get(f"{prefix}{kind}{group}") for group in range(self.num_gemms)]
            if not single and whole is not None and whole.shape[0] != self.num_gemms:
                errors.append(
                    f"size mismatch for {prefix}{kind}: the checkpoint has one parameter of {whole.shape[0]} groups, "
                    f"and this layer has {self.num_gemms} groups"
                )
            elif not single and whole is not None:
                del converted[prefix + kind]
                for group, own in enumerate(_plain_and_whole(whole).unbind(0)):
                    name = f"{kind}{group}"
                    converted[prefix + name] = _placed_like(own, own_parameters(self)[name])
            elif single and all(part is not None for part in parts):
                for group in range(self.num_gemms):
                    del converted[f"{prefix}{kind}{group}"]
                stacked = torch.stack([_plain_and_whole(part) for part in parts])
                converted[prefix + kind] = _placed_like(stacked, own_parameters(self)[kind])
        super()._load_from_state_dict(converted, prefix, *args)


def _plain_and_whole(value: Any) -> Tensor:
    """Return a tensor of a state dict, gathered and dequantized; every rank of its mesh must call this."""
    value = value.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return plain(value)


def _placed_like(value: Tensor, parameter: Any) -> Tensor:
    """Return the tensor, sharded where the parameter that takes it is."""
    if not hasattr(parameter, "device_mesh"):
        return value
    distribute = torch.distributed.tensor.distribute_tensor  # type: ignore[attr-defined]  # there, as the parameter is
    return distribute(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def check_format(layer: Any, weight: Any, operand: Operand) -> None:
    """
    Raises:
        RuntimeError: a layer's weight is quantized in another format than the recipe's.
    """
    held = weight.storage_name if isinstance(weight, GroupedTensor) else weight._BARE_NAME
    if held != operand.storage_name:
        raise RuntimeError(
            f"parameter 'weight' of {layer_name(layer)} holds {held}, the recipe in force wants "
            f"{operand.storage_name}; use the recipe of quantized_model_init or shard"
        )


def grouped_buffers_of(tensor: GroupedTensor) -> OperandBuffers:
    """Return a quantized parameter as an operand; its buffers are shared."""
    storage = grouped_storage_of(tensor)
    usages = storage.get_usages()
    return OperandBuffers(
        storage.rowwise_operand() if usages["rowwise"] else [],
        storage.columnwise_operand() if usages["columnwise"] else [],
        storage.quantizer,  # type: ignore[arg-type]
    )


def joined_buffers_of(weights: list[Any]) -> OperandBuffers:
    """Return weights that were quantized one by one as the operand of all of them.

    Row-wise in buffers of its own; column-wise those of the weights, first ones first, which the backward joins: a copy
    would be kept until then, and what FSDP2 gathers may be there only then. Of one weight alone both are joined.
    """
    storages = [storage_of(weight) for weight in weights]
    first, (rows, columns) = storages[0], weights[0].shape
    usages, layout = first.get_usages(), grouped_layout(weights[0]._BARE_NAME)
    how = (len(storages), rows, columns, weights[0].dtype)
    operands: list[list[Tensor]] = []
    for columnwise, there in ((False, usages["rowwise"]), (True, usages["columnwise"])):
        own = [s.columnwise_operand() if columnwise else s.rowwise_operand() for s in storages if there]
        buffers = [buffer.detach() for same in zip(*own) for buffer in same]
        if there and not (columnwise and len(weights) > 1):
            buffers = join_weights(buffers, first._quantizer, layout, columnwise, *how)
        operands.append(buffers)
    return OperandBuffers(operands[0], operands[1], first._quantizer)  # type: ignore[arg-type]


def rows_of_buffer(
    buffer: Tensor | None,
    label: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    read: Tensor | None = None,
) -> Tensor | None:
    """Return a tensor that a result is written to, as a matrix of rows.

    Args:
        label: its name in messages.
        shape: (*lead, K), dtype and device that it must have.
        read: the input, where it is still read after the result was written.
    Raises:
        ValueError: it does not, is not contiguous, is quantized, requires a gradient, or shares memory with ``read``.
    """
    if buffer is None:
        return None
    if isinstance(buffer, QuantizedTensor):
        raise ValueError(f"{label} is {a_kind(buffer)}; results are not quantized, pass a plain tensor")
    if buffer.shape != torch.Size(shape) or buffer.dtype != dtype or buffer.device != device:
        raise ValueError(
            f"{label} is {buffer.dtype} {shape_of(buffer)} on {buffer.device}; the result is {dtype} "
            f"{tuple(shape)} on {device}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"{label} has strides {buffer.stride()}; pass a contiguous tensor")
    if buffer.requires_grad:
        raise ValueError(
            f"{label} requires a gradient; pass a tensor that is only written to, such as {label}.detach()"
        )
    if read is not None and _share_memory(buffer, read):
        raise ValueError(
            f"{label} shares memory with inp, which the backward reads again; pass a tensor of its own"
        )
    return buffer.view(-1, shape[-1])


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors overlap; in traced code, where memory has no address, whether they are one or its
    view.
    """
    if not has_addresses():
        return (
            a is b
            or base_of(a) is b
            or base_of(b) is a
            or (base_of(a) is not None and base_of(a) is base_of(b))
        )
    spans = []
    for tensor in (a, b):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    (start, end), (other_start, other_end) = spans
    return a.numel() > 0 and b.numel() > 0 and start < other_end and other_start < end
