"""``LinearLayer``: base of layers with linear layers inside, and of what these read besides their operands.

A module of ``nn`` or ``ops`` is its parameters and the order of its stages; all that its stages have in common is
here. Before the autograd function is entered, ``_plan`` finds the plan of a stage, and ``_fwd_args`` everything else
that it reads: scales, a quantized weight that is there already, where its weight gradient goes, how it is split over
processes. The autograd function gets these as values and never sees the module, so that graphs hold no module,
either.

A quantized weight is there already in two cases. The parameter itself may be one. Or an earlier microbatch has left
it in ``_fp8_workspaces``, beside a note of the parameters it was made from: it is used only while these have not been
written to (``functional/kept_weights.py``) and the quantizer has the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._checks import flags, function, shape_of, shown
from .._determinism import DETERMINISM
from .._tracing import record, records_transforms, refuse_in_transform, warn
from ..autograd import (
    TO_AUTOGRAD,
    DelayedScales,
    LinearFunction,
    LinearFwdArgs,
    LinearWgrad,
    add_to_main_grad_,
    compute_wgrad,
    concatenate,
    traced_linear,
)
from ..functional import calibrate_, product, use_kept
from ..functional.wgrad_store import WeightGradStore
from ..quantizers import Operand, OperandBuffers, Quantizer, buffers_of
from ..recipe import LinearPlan, Recipe, linear_plan
from ..state import THREAD
from ..tensors import GroupedTensor, QuantizedTensor, dequantized, local, plain, spread_like, storage_of
from ..tensors.storage import resolve_storage_class
from ..upstream.fsdp import is_distributed, is_managed, replace_local_part
from ..upstream.modules import own_parameters
from ..upstream.tensors import in_transform
from .accelerate_hook import AccelerateHook
from .delayed import DelayedLayer
from .parameters import (
    INIT_STD,
    accumulate,
    begun_main_grads,
    largest_magnitude,
    layer_name,
    main_grad_of,
    mark_added_to_main_grad,
    mark_after_accumulation,
    named_layer,
    quantize_parameter,
    random_numbers_of,
    remedy,
    weight_quantizer,
)
from .tensor_parallel import Parallel, Split, TensorParallelLayer, mark_partition


class Stage(NamedTuple):
    """One linear layer inside a layer.

    ``prefix``: of its buffers. ``name``: in quantizer roles. ``weight``, ``bias``: names of its parameters.
    ``init_method``: fills the weight in place; None is normal with standard deviation 0.023.
    """

    prefix: str
    name: str
    weight: str
    bias: str
    init_method: Callable[[Tensor], Any] | None = None


class LinearLayer(TensorParallelLayer, DelayedLayer):
    """Base of the layers with linear layers inside.

    Args:
        name: the layer's name in quantizer roles.
        stages: its linear layers, in the order in which a backward meets them.
        device: of the queues of weight gradients.
        recipe: its own recipe, or its name.
        fuse_wgrad_accumulation: add weight gradients to the parameter's ``main_grad`` instead of its ``grad``.
        delay_wgrad_compute: weight and bias gradients wait for :meth:`backward_dw`.
        parts: names of the parameters that together are a weight or bias, by its name; none for one that is whole.
        parallel: how it is split over processes; None if it is not.
    """

    # quantized weights, kept by convert/stored.py or gathered by distributed/, are row-wise alone
    _stored_rowwise: bool = False
    # the name of the four-bit format that convert/stored.py keeps the weight in, and each pass decodes; "" without
    _decodes: str = ""
    return_bias: bool = False
    _hf_hook = AccelerateHook()

    def __init__(
        self,
        name: str | None,
        stages: tuple[Stage, ...],
        device: torch.device,
        *,
        recipe: Recipe | str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        parts: dict[str, list[str]] | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        if "_parameters" not in self.__dict__:  # else a module with parameters becomes such a layer
            nn.Module.__init__(self)
        self.name, self._stages = name or "", stages
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self._parts = parts or {}
        # weight name -> its queue; in the order in which a backward meets them
        self.wgrad_stores = {s.weight: WeightGradStore(device) for s in stages} if delay_wgrad_compute else {}
        self._wgrad_hooks: list[Callable[[], Any]] = []
        # Name of a weight -> (value of the quantizer that made it, its buffers), or None. All names are there from the
        # start: a compiled graph is guarded on the keys of a dict that it writes to.
        self._fp8_workspaces: dict[str, tuple[str, OperandBuffers] | None] = {s.weight: None for s in stages}
        self._init_recipe, self._init_preserve = THREAD.state.init_recipe, THREAD.state.init_preserve
        # a layer for inference has no use for twice the bytes
        self._init_columnwise = torch.is_grad_enabled()
        self._init_recipe_owner(recipe)
        self._init_delayed({stage.prefix: stage.name for stage in stages})
        if parallel is not None:
            self._init_tensor_parallel(parallel)

    # -- parameters --------------------------------------------------------------------------------------------------

    def _add_linear(self, stage: Stage, rows: list[int], columns: int, bias: bool, **like: Any) -> None:
        """Uninitialized parameters of ``rows`` each, parts of one allocation."""
        self._add_parts(stage.weight, torch.empty(sum(rows), columns, **like), rows)
        self._add_parts(stage.bias, torch.empty(sum(rows), **like) if bias else None, rows)

    def _names_of(self, name: str) -> list[str]:
        """Return names of the parameters that hold a weight or bias."""
        return self._parts.get(name, [name])

    def _add_parts(self, name: str, value: Tensor | None, rows: list[int]) -> None:
        names = self._names_of(name)
        parts = [None] * len(names) if value is None else value.split(rows)
        for part_name, part in zip(names, parts, strict=True):
            whole = value if len(names) == 1 else part
            self.register_parameter(part_name, None if part is None else nn.Parameter(whole))  # type: ignore[arg-type]

    def _parts_of(self, name: str) -> list[Tensor]:
        """Return the parameters that hold a weight or bias: one, several, or none if there is no bias.

        Raises:
            ValueError: some of several are None.
        """
        names = self._parts.get(name, [name])
        parts = [getattr(self, part) for part in names]
        found = [part for part in parts if part is not None]
        if found and len(found) < len(parts):
            missing = next(part for part, value in zip(names, parts) if value is None)
            raise ValueError(
                f"{missing} of {named_layer(self)} is None; assign an nn.Parameter like the others"
            )
        return found

    def _whole(self, name: str) -> Any:
        """Return a weight or bias: the parameter, or what its parts are together; None without."""
        if name not in self._parts:
            return self._part(name) if self._placed else getattr(self, name)
        parts = self._parts_of(name)
        return concatenate(parts) if parts else None

    def _matrices(self, stage: Stage) -> list[Tensor]:
        """Return the parameters of a weight as they are quantized: (N, K) each, or (G, N, K)."""
        return self._parts_of(stage.weight)

    def _state_device(self, prefix: str) -> torch.device:
        stage = next(stage for stage in self._stages if stage.prefix == prefix)
        return self._parts_of(stage.weight)[0].device

    def weight_amax(self, prefix: str) -> Tensor:
        """Return max|w| of the weight of every group of a stage, fp32."""
        stage = next(stage for stage in self._stages if stage.prefix == prefix)
        parts = [part.detach() for part in self._parts_of(stage.weight)]
        if self._decodes:
            parts = [plain(part) for part in parts]
        elif isinstance(parts[0], (GroupedTensor, QuantizedTensor)):
            return torch.zeros(self._groups, dtype=torch.float32, device=parts[0].device)
        largest = [largest_magnitude(part, part.dim() == 3) for part in parts]
        return torch.cat(largest) if self._groups > 1 else torch.stack(largest).amax(0)

    @torch.no_grad()
    def _reset_linear(self, stage: Stage) -> None:
        """Initialize the parameters of a stage where they are; a weight that is to be stored quantized, now is."""
        parts = self._parts_of(stage.weight)
        value: Any = parts[0]
        if self._init_recipe is not None:
            value = torch.zeros_like(value)  # plain, and sharded as the parameter is
        elif len(parts) > 1:
            rows = sum(part.shape[0] for part in parts)
            value = torch.empty(rows, value.shape[1], dtype=value.dtype, device=value.device)
        self._draw(stage, value)
        if self._init_recipe is not None and is_distributed(value):
            parts[0].copy_(value)  # FSDP2 has the parameter
        elif self._init_recipe is not None:
            setattr(
                self, stage.weight, quantize_parameter(value, self._stored_as(stage), self._init_preserve)
            )
        elif len(parts) > 1:
            for part, own in zip(parts, value.split([part.shape[0] for part in parts])):
                part.copy_(own)
        for bias in self._parts_of(stage.bias):
            bias.zero_()

    def _draw(self, stage: Stage, value: Tensor) -> None:
        """Fill a weight with its first values, from the layer's random numbers."""
        with random_numbers_of(self.get_rng_state_tracker, self.rng_tracker_name):
            if stage.init_method is None:
                value.normal_(0.0, INIT_STD)
            else:
                function("init_method", stage.init_method, "torch.nn.init.xavier_uniform_")
                stage.init_method(value)

    def _stored_as(self, stage: Stage) -> Quantizer:
        """Return the quantizer of a weight that ``quantized_model_init`` has stored."""
        quantizer = weight_quantizer(self._init_recipe, stage.name, self._module_type)  # type: ignore[arg-type]
        return quantizer.with_usage(columnwise=self._init_columnwise)

    def _reset_state(self) -> None:
        self.reset_delayed_scaling()
        self._drop_workspaces()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._drop_workspaces()  # made from the parameter that was here
        self._prepare_parameters()

    def _prepare_parameters(self) -> None:
        """Mark new parameters for data-parallel wrappers: what to expect of their gradients."""
        weights = [name for stage in self._stages for name in self._names_of(stage.weight)]
        biases = [name for stage in self._stages for name in self._names_of(stage.bias)]
        for name, parameter in own_parameters(self).items():
            if parameter is None:
                continue
            if self.fuse_wgrad_accumulation and name in weights:
                mark_after_accumulation(parameter)
            self._mark_parameter(name, parameter)
            if self.delay_wgrad_compute and name in (*weights, *biases) and name != self._bias_behind:
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _mark_parameter(self, name: str, parameter: Tensor) -> None:
        """Mark how a parameter is split, or whether a full one has the gradient of a row shard."""
        split = self._split_of(name)
        if split is not None:
            mark_partition(parameter, split.dim)  # type: ignore[arg-type]
        elif (
            self.tp_size > 1
            and not self._placed
            and (self._of_rows(name) or self._stage_of(name) is not None)
        ):
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _stage_of(self, name: str) -> Stage | None:
        """Return the stage that is split and has a weight or bias of this name."""
        return next(
            (
                stage
                for stage in self._stages
                if (self._parallel or {}).get(stage.prefix) is not None
                and name in (*self._names_of(stage.weight), *self._names_of(stage.bias))
            ),
            None,
        )

    def _split_of(self, name: str) -> Split | None:
        stage = None if self._placed else self._stage_of(name)
        if stage is None:
            return None
        parallel = self._parallel[stage.prefix]  # type: ignore[index]
        column = parallel.mode == "column"
        if not column and name in self._names_of(stage.bias):
            return None
        blocks = self._row_blocks.get(stage.weight, ()) if column else ()
        return Split(0 if column else 1, parallel.group, self.tp_size, "tensor", blocks)

    def _takes_rows(self, storage_name: str) -> bool:
        """Note that weights come row-wise alone, and say whether the layer can do with that in this format."""
        self._stored_rowwise = True
        return True

    def _makes_columns(self, weight: Any) -> bool:
        """Whether the backward can make the column-wise data of a stored weight from its row-wise data."""
        return self._stored_rowwise or (isinstance(weight, QuantizedTensor) and storage_of(weight)._turns())

    # -- what a forward reads ----------------------------------------------------------------------------------------

    def _plan(
        self,
        recipe: Recipe | None,
        stage: Stage,
        needs_input: bool,
        weight: Tensor,
        save_original_input: bool = False,
        hands_over: bool = False,
    ) -> LinearPlan:
        grad = torch.is_grad_enabled()
        if recipe is not None and not records_transforms() and in_transform():
            refuse_in_transform(named_layer(self), ", or no recipe: narrowcast.autocast(enabled=False)")
        return linear_plan(
            recipe,
            stage.name,
            grad and needs_input,
            grad and weight.requires_grad,
            save_original_input,
            hands_over,
            module_type=self._module_type,
            weight_elements=None if self._decodes else weight.numel(),  # codes of eight bits are never kept
            joins=self._parallel is not None,
        )

    def _fwd_args(
        self,
        stage: Stage,
        plan: LinearPlan,
        dtype: torch.dtype,
        weight: Tensor,
        bias: Tensor | None,
        is_first_microbatch: bool | None,
        scales: DelayedScales | None = None,
        workspace: OperandBuffers | None = None,
        needs_bias: bool | None = None,
    ) -> LinearFwdArgs:
        """Return a stage's arguments for the autograd function besides its operands.

        Args:
            weight: whole, or of several groups the first.
            scales: where they were read already.
            workspace: of a stored weight, where it was made already.
            needs_bias: whether the gradient of the bias is requested; None: ``bias`` tells.
        Raises:
            TypeError: ``is_first_microbatch`` is no bool, or the weight is of float64.
            RuntimeError: the weight is stored without the data that the backward reads, or in another format.
            ValueError: the bias does not fit the weight; the layer is split in a way that the batch-invariant mode does
                not allow.
        """
        if plan.quantized and weight.dtype == torch.float64:
            raise TypeError(
                f"{stage.weight} of {named_layer(self)} is torch.float64, which no recipe quantizes; call .float() or "
                ".bfloat16() on the model and its input"
            )
        if bias is not None and bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"{stage.bias} has shape {shape_of(bias)}; it needs {weight.shape[0]} elements, one for each row of "
                f"{stage.weight}, {shape_of(weight)}"
            )
        if is_first_microbatch is not None:
            flags(is_first_microbatch=is_first_microbatch)
        scales = scales or self._scales_of((stage.prefix,), (plan,))[0]
        parallel = None if self._parallel is None else self._split_over(stage.prefix)
        if parallel is not None and plan.batch_invariant:
            quantized = plan.weight if plan.quantized else None
            parallel.check_batch_invariant(quantized, weight.shape[1], plan.batch_invariant)
        made, workspace, lacks_columns = workspace, None, False
        stored = isinstance(weight, (GroupedTensor, QuantizedTensor))
        decoded = buffers_of(weight) if self._decodes and isinstance(weight, QuantizedTensor) else None
        if decoded is None and plan.quantized:
            if is_first_microbatch is not None or stored:
                workspace = made or self._workspace(stage, plan.kept_weight, weight, is_first_microbatch)
            elif self._reads_written():
                made_from = [part.detach() for part in self._parts_of(stage.weight)]
                workspace = self._kept_weight(stage.weight, plan.kept_weight, made_from)
        if workspace is not None:
            reads_columns = plan.needs_input and plan.backward_override is None
            lacks_columns = reads_columns and not workspace.columnwise
            if lacks_columns and not self._makes_columns(weight):
                kind = plan.kept_weight.storage_name.rpartition(":")[2]
                raise RuntimeError(
                    f"parameter {shown(stage.weight)} of {named_layer(self)} has no column-wise data "
                    "for the gradient of the input, and the layer does not make it from the row-wise data of "
                    f"{kind}; make the layer with gradients enabled, or quantize the weight with columnwise=True, or "
                    "run it under torch.no_grad()"
                )
        wgrad = TO_AUTOGRAD
        if (self.fuse_wgrad_accumulation or self.delay_wgrad_compute) and plan.needs_weight:
            wgrad = self._wgrad(stage.weight, is_first_microbatch)
        if needs_bias is None:
            needs_bias = torch.is_grad_enabled() and bias is not None and bias.requires_grad
        how = lacks_columns, parallel, decoded
        return record(LinearFwdArgs, (plan, dtype, scales, workspace, wgrad, needs_bias, *how))

    def _workspace(
        self,
        stage: Stage,
        operand: Operand,
        weight: Tensor,
        is_first_microbatch: bool | None,
    ) -> OperandBuffers:
        """Return the quantized weight of several microbatches: a quantized parameter, what the first one left, or made
        now.

        Raises:
            RuntimeError: the parameter is quantized in another format than the recipe's.
        """
        if isinstance(weight, QuantizedTensor):
            wanted = resolve_storage_class(operand.storage_name)
            if not isinstance(weight, wanted):
                raise RuntimeError(
                    f"parameter {shown(stage.weight)} of {named_layer(self)} is a "
                    f"{type(weight).__name__}, the recipe in force wants {wanted.__name__}; use the recipe of "
                    "quantized_model_init or shard"
                )
            return buffers_of(weight)
        made_from = [weight] if self._placed else self._parts_of(stage.weight)
        made_from = [part.detach() for part in made_from]
        kept = None if is_first_microbatch else self._kept_weight(stage.weight, operand, made_from)
        if kept is not None:
            return kept
        buffers = operand.quantize(weight.detach())
        return self._keep_weight(stage.weight, operand, made_from, buffers)

    def _kept_weight(self, name: str, operand: Operand, made_from: list[Tensor]) -> OperandBuffers | None:
        """Return the weight kept by an earlier microbatch; None without, or if the weight has changed.

        Raises:
            RuntimeError: it has changed, and compiled code runs, which cannot turn back.
        """
        kept = self._fp8_workspaces[name]
        if kept is None or kept[0] != operand.value:
            return None
        buffers = kept[1]
        *others, last = buffers.rowwise
        last = use_kept(last, made_from)
        return (
            None if last is None else OperandBuffers([*others, last], buffers.columnwise, buffers.quantizer)
        )

    def takes_codes(self) -> bool:
        """Return whether forwards can read codes that an optimizer writes of the parameters."""
        return not self._placed

    def _reads_written(self) -> bool:
        """Return whether this forward reads codes that an optimizer writes."""
        return self.codes_are_written and self.training and not THREAD.state.depth

    def _keep_weight(
        self, name: str, operand: Operand, made_from: list[Tensor], buffers: OperandBuffers
    ) -> OperandBuffers:
        """Keep a quantized weight for later microbatches; not under FSDP, whose writes do not raise its version."""
        if is_managed(self):
            return buffers
        *others, last = buffers.rowwise
        noted: Any = use_kept(last, made_from, first=True)
        buffers = OperandBuffers([*others, noted], buffers.columnwise, buffers.quantizer)
        self._fp8_workspaces[name] = (operand.value, buffers)
        return buffers

    def kept_parameters(self) -> list[Tensor]:
        """Return parameters that kept weights are made from."""
        parts = [part for stage in self._stages for part in self._parts_of(stage.weight)]
        return [part for part in parts if not isinstance(part, (GroupedTensor, QuantizedTensor))]

    @torch.no_grad()
    def refresh_kept_weights(self) -> list[OperandBuffers]:
        """Quantize the kept weights once more, into the buffers that they have, which a CUDA graph reads.

        Returns:
            these buffers, to be kept alive as long as the graph is replayed.
        """
        recipe, refreshed = self._recipe_in_force(), []
        for stage in self._stages:
            kept, weight = self._fp8_workspaces[stage.weight], self._whole(stage.weight)
            if recipe is None or kept is None or isinstance(weight, QuantizedTensor):
                continue
            plan = linear_plan(recipe, stage.name, True, True, module_type=self._module_type)
            quantized = plan.kept_weight.quantize(weight.detach())
            old, new = ((*buffers.rowwise, *buffers.columnwise) for buffers in (kept[1], quantized))
            for buffer, values in zip(old, new, strict=True):
                buffer.copy_(values)
            refreshed.append(kept[1])
        return refreshed

    def _drop_workspaces(self) -> None:
        self._fp8_workspaces.update(dict.fromkeys(self._fp8_workspaces))

    def _warn_of_delayed_input(self) -> None:
        warn(
            "save_original_input is ignored: the custom recipe scales the input of "
            f"{named_layer(self)} with delay"
        )

    # -- in high precision -------------------------------------------------------------------------------------------

    def _linear_in_high_precision(
        self, stage: Stage, inp: Tensor, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None
    ) -> Tensor:
        if is_first_microbatch is not None:
            flags(is_first_microbatch=is_first_microbatch)
        # PyTorch multiplies a real tensor with one on meta to unwritten memory
        if weight.device != inp.device:
            raise RuntimeError(
                f"{stage.weight} is on {weight.device}, its input on {inp.device}; {remedy(weight)}"
            )
        calibrating = THREAD.state.calibrating
        if calibrating is not None:
            self._calibrate(stage, calibrating, inp)
        if (
            self.fuse_wgrad_accumulation
            or self.delay_wgrad_compute
            or self._parallel is not None
            or DETERMINISM.batch_invariant
        ):  # the gradient does not go autograd's way, or the product not PyTorch's
            plan = self._plan(None, stage, inp.requires_grad, weight)
            args = self._fwd_args(stage, plan, inp.dtype, weight, bias, is_first_microbatch)
            return (traced_linear if is_dynamo_compiling() else LinearFunction.apply)(weight, inp, bias, args)  # type: ignore[no-any-return]
        x = plain(inp)
        return product(x, plain(weight).to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _calibrate(self, stage: Stage, recipe: Recipe, inp: Tensor) -> None:
        """Collect the amax of the input under an autocast that only calibrates."""
        plan = linear_plan(recipe, stage.name, True, True, module_type=self._module_type)
        if plan.input.unseen is not None:
            self._keep_states((stage.prefix,), (plan,))
            amax = getattr(self, f"{stage.prefix}amax")
            calibrate_(plain(inp).detach(), None, amax)

    def _with_bias_behind(self, out: Tensor, bias: Tensor | None) -> Tensor:
        """Return the summed output of a row-parallel stage plus its bias, unless the bias is returned beside it."""
        return out if bias is None or self.return_bias else out + bias.to(out.dtype)

    # -- where weight gradients go -----------------------------------------------------------------------------------

    def _wgrad(self, name: str, is_first_microbatch: bool | None) -> LinearWgrad:
        store = self.wgrad_stores.get(name)
        ticket = None if store is None else store.ticket
        if not self.fuse_wgrad_accumulation:
            return LinearWgrad(None, False, "", store, ticket)
        weight = getattr(self, name)
        main_grad, overwrite, dummy = main_grad_of(weight, name, layer_name(self))
        begins = begun_main_grads([weight], is_first_microbatch)
        return LinearWgrad(main_grad, overwrite, dummy, store, ticket, *begins)

    def need_backward_dw(self) -> bool:
        """Return whether weight gradients of this layer wait for :meth:`backward_dw`."""
        return self.delay_wgrad_compute

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight and bias gradients of the oldest backward, and add them to ``grad`` or ``main_grad``.

        Does nothing without ``delay_wgrad_compute``. Then the hooks of
        :meth:`register_wgrad_accumulation_and_reduce_hooks` run.

        Raises:
            RuntimeError: there was no backward since the last call.
        """
        if not self.delay_wgrad_compute:
            return
        self._compute_waiting_wgrads()
        for hook in self._wgrad_hooks:
            hook()

    def _compute_waiting_wgrads(self) -> None:
        """Compute the weight gradients that wait from one backward, and store each in ``grad`` or ``main_grad``."""
        for stage in self._stages:
            weights: list[Any] = self._parts_of(stage.weight)
            store = self.wgrad_stores[stage.weight]
            wanted = any(weight.requires_grad for weight in weights)
            if not wanted and not len(store):  # frozen in the forward
                continue
            deferred = store.pop()
            if not wanted:  # frozen since: autograd drops such a gradient, too
                pass
            elif self.fuse_wgrad_accumulation:
                into = [weight.main_grad if weight.requires_grad else None for weight in weights]
                add_to_main_grad_(deferred, into if deferred.groups else into[0])
                for weight in weights:
                    if weight.requires_grad:
                        mark_added_to_main_grad(weight)
            else:
                *_, rows, columns = weights[0].shape
                rows = rows if deferred.groups else sum(weight.shape[0] for weight in weights)
                wgrad = compute_wgrad(deferred, (rows, columns), weights[0].dtype)
                _accumulate_parts(weights, wgrad)  # in one allocation
            if deferred.grad_bias is not None:
                _accumulate_parts(self._parts_of(stage.bias), deferred.grad_bias)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call ``hook()`` at the end of every :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    # -- moving, saving, loading -------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> LinearLayer:
        self._drop_workspaces()
        shards = {name: local(p) for name, p in own_parameters(self).items() if is_distributed(p)}
        super()._apply(fn, recurse)
        for name, shard in shards.items():
            moved: Any = own_parameters(self)[name]
            if isinstance(shard, QuantizedTensor) and not isinstance(local(moved), QuantizedTensor):
                # a DTensor in another dtype became plain
                replace_local_part(moved, shard._with_values(local(moved)))
        for store in self.wgrad_stores.values():
            store.ticket = fn(store.ticket)
        self._prepare_parameters()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self._drop_workspaces()
        if local_metadata.get("assign_to_params_buffers", False):
            state_dict = dict(state_dict)
            for name, parameter in own_parameters(self).items():
                value, held = state_dict.get(prefix + name), local(parameter)
                if is_distributed(value) and isinstance(held, QuantizedTensor):  # stays stored as codes
                    codes = torch.empty_like(held, device=value.device)
                    codes.copy_(local(value))
                    state_dict[prefix + name] = spread_like(codes, value)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Plain tensors only: a quantized parameter is saved as its high-precision value, but with ``keep_vars``."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:  # the parameters themselves: all of their bits
            return
        for name, parameter in own_parameters(self).items():
            if isinstance(local(parameter), (GroupedTensor, QuantizedTensor)):
                destination[prefix + name] = dequantized(parameter)

    def __getstate__(self) -> dict[str, Any]:
        kept = dict.fromkeys(self._fp8_workspaces)  # and no optimizer writes those of a copy
        return {**super().__getstate__(), "_fp8_workspaces": kept, "codes_are_written": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare_parameters()


def _accumulate_parts(parameters: list[Tensor], grad: Tensor) -> None:
    """Give each parameter its part of a gradient, in which they lie one after another."""
    parts = grad.view(-1).split([parameter.numel() for parameter in parameters])
    for parameter, own in zip(parameters, parts, strict=True):
        if parameter.requires_grad:
            accumulate(parameter, own.view(parameter.shape))
