"""What modules of grouped linear layers share: parameters of all groups, arguments of the boundary, checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import DelayedTensors, GroupedLinearArgs, LinearNeeds, LinearWgrad
from ..autograd.grouped_linear import (
    ResultBuffers,
    add_to_main_grads_,
    calibrate_groups_,
    compute_grouped_wgrad,
)
from ..quantizers import Quantizer
from ..recipe import LinearHandles, Recipe
from ..state import STATE, DelayedScalingState
from ..tensors import (
    GroupedTensor,
    GroupedTensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    grouped_layout,
    grouped_storage_of,
    quantize_members,
)
from .module import (
    QuantizedModule,
    _accumulate,
    _is_marked,
    _mark_added_to_main_grad,
    main_grad_of,
    parameter_device,
)
from .stages import INIT_STD, checked_input, positive


class GroupedLinearModule(QuantizedModule):
    """Base of the modules with one linear layer per group; arguments as of ``GroupedLinear``."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        positive(num_gemms=num_gemms, in_features=in_features, out_features=out_features, tp_size=tp_size)
        in_features, out_features = _sharded(in_features, out_features, parallel_mode, tp_size)
        if bias and tp_size > 1:
            raise ValueError(
                f"bias=True with tp_size={tp_size}; GroupedLinear has no tensor-parallel bias, pass bias=False"
            )
        place = parameter_device(device)
        super().__init__(
            name,
            place,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            gemms=(("weight", "bias"),),  # of all groups together, however many parameters they are
        )
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.parallel_mode = bias, parallel_mode
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.save_original_input = save_original_input
        self._init_method = init_method
        self._init_recipe, self._init_preserve = STATE.init_recipe, STATE.init_preserve
        if self._init_recipe is not None:
            _check_quantized_weight(self._init_recipe, self.name, self.single_grouped_weight)
        _give_every_group_a_slot(self.delayed_scaling, num_gemms)
        dtype = params_dtype or torch.get_default_dtype()
        # one allocation for all groups: operators then read the parameters of all groups without gathering them
        self._register("weight", torch.empty(num_gemms, out_features, in_features, dtype=dtype, device=place))
        self._register(
            "bias", torch.empty(num_gemms, out_features, dtype=dtype, device=place) if bias else None
        )
        if place.type != "meta":
            self.reset_parameters()

    def _register(self, kind: str, values: Tensor | None) -> None:
        """Parameters of all groups, as one or as one per group."""
        single = self.single_grouped_weight if kind == "weight" else self.single_grouped_bias
        self.register_parameter(kind, nn.Parameter(values) if single and values is not None else None)
        for group in range(self.num_gemms):
            own = None if single or values is None else nn.Parameter(values[group])
            self.register_parameter(f"{kind}{group}", own)
        for parameter in self._parameters_of(kind):
            _mark_partition(parameter, kind, self.parallel_mode)

    def _parameters_of(self, kind: str) -> list[Tensor]:
        """All weights or all biases: one, one per group, or none."""
        single = self._parameters[kind]
        if single is not None:
            return [single]
        own = [self._parameters[f"{kind}{group}"] for group in range(self.num_gemms)]
        return [parameter for parameter in own if parameter is not None]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._drop_workspaces()  # one cache for the weights of all groups

    def _prepare_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            if self.fuse_wgrad_accumulation and name.startswith("weight") and not _is_marked(parameter):
                parameter.register_post_accumulate_grad_hook(_mark_added_to_main_grad)
            if self.delay_wgrad_compute:
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        """Sizes, as printed by the module."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights, biases and state; parameters on the meta device are first made on the default device."""
        for kind in ("weight", "bias"):
            old = self._parameters_of(kind)
            if not old:
                continue
            if old[0].is_meta:
                shape = (self.num_gemms, self.out_features, self.in_features)[: 3 if kind == "weight" else 2]
                self._register(kind, torch.empty(shape, dtype=old[0].dtype, device=parameter_device(None)))
                for parameter, before in zip(self._parameters_of(kind), old, strict=True):
                    parameter.requires_grad_(before.requires_grad)
        for parameter in self._parameters_of("bias"):
            parameter.zero_()
        self._reset_weights()
        device = self._parameters_of("weight")[0].device
        self.delayed_scaling.to_empty(device=device)
        self.delayed_scaling.reset()
        self._drop_workspaces()

    def _reset_weights(self) -> None:
        weights = self._parameters_of("weight")
        single = self._parameters["weight"]
        # group by group, so that both forms of the parameters start from the same values
        values = (
            torch.empty(single.shape, dtype=single.dtype, device=single.device)
            if single is not None
            else None
        )
        for value in weights if values is None else values.unbind(0):
            if self._init_method is None:
                nn.init.normal_(value, mean=0.0, std=INIT_STD)
            else:
                self._init_method(value)
        if single is None or values is None:
            return
        if self._init_recipe is None:
            single.copy_(values)
            return
        quantizer = _weight_quantizer(self._init_recipe, self.name)
        parameter = nn.Parameter(GroupedTensor(quantize_members([values], quantizer)), single.requires_grad)
        if not isinstance(parameter, GroupedTensor):
            raise RuntimeError(f"{quantizer!r} gave no GroupedTensor, so its weights cannot be a parameter")
        if self._init_preserve:
            parameter._high_precision_init_val = values.cpu()
        self.register_parameter("weight", parameter)
        _mark_partition(parameter, "weight", self.parallel_mode)

    # -- what the boundary reads --------------------------------------------------------------------------------------

    def _arguments(
        self,
        dtype: torch.dtype,
        needs: LinearNeeds,
        biases: list[Tensor],
        covered: bool,
        buffers: ResultBuffers,
        is_first_microbatch: bool | None = None,
    ) -> GroupedLinearArgs:
        """Everything beside the operands, under the recipe in force; ``dtype``: of the input, as the GEMMs take it."""
        weight, recipe = self._parameters_of("weight")[0], STATE.recipe
        handles = None if recipe is None else recipe.linear_handles(self.name)
        delayed, save_original = DelayedTensors(), False
        if handles is not None and recipe is not None:
            delayed = self._delayed_tensors(handles.managed, recipe)
            save_original = self.save_original_input and self._can_save_original(recipe)
        store = self.wgrad_stores.get("weight")
        return GroupedLinearArgs(
            quantizers=handles,
            delayed=delayed,
            numerics=self._numerics(recipe, dtype, weight.dtype, save_original),
            needs=needs,
            covered=covered,
            workspace=None if handles is None else self._grouped_workspace(handles, is_first_microbatch),
            cache_weight=handles is not None
            and is_first_microbatch is not None
            and not isinstance(weight, GroupedTensor),
            out_features=self.out_features,
            in_features=self.in_features,
            num_gemms=self.num_gemms,
            bias_dtype=biases[0].dtype if biases else None,
            split_weights=not self.single_grouped_weight,
            split_biases=not self.single_grouped_bias,
            wgrads=self._wgrads(is_first_microbatch, needs.weight),
            store=store,
            ticket=None if store is None else store.ticket,
            buffers=buffers,
        )

    def _needs(self, grad: bool, inp: bool, biases: list[Tensor]) -> LinearNeeds:
        """Which gradients are wanted, if any are; ``inp``: that of the input."""
        return LinearNeeds(
            inp=grad and inp,
            weight=grad and any(weight.requires_grad for weight in self._parameters_of("weight")),
            bias=grad and any(bias.requires_grad for bias in biases),
        )

    def _calibrate(self, x: Tensor, splits: Tensor, weights: list[Tensor]) -> None:
        """Collect amax for a recipe that only calibrates."""
        calibrating = STATE.calibrating
        handles = None if calibrating is None else calibrating.linear_handles(self.name)
        if calibrating is None or handles is None or handles.forward_state is None:
            return
        state = self._delayed_tensors(handles.forward_state, calibrating)
        plain = [w.dequantize() if isinstance(w, GroupedTensor) else w for w in weights]
        calibrate_groups_(
            x.detach(),
            splits,
            [w.detach() for w in plain],
            handles,
            state.scale_fwd,
            state.amax_fwd,
            self.num_gemms,
        )

    def _grouped_workspace(
        self, handles: LinearHandles, is_first_microbatch: bool | None
    ) -> GroupedTensorStorage | None:
        """The quantized weights that need not be made: a quantized parameter, or what the first microbatch left."""
        weight = self._parameters["weight"]
        handle = handles.weight.both
        if isinstance(weight, GroupedTensor):
            if weight.storage_name != handle.storage_name:
                raise RuntimeError(
                    f"parameter 'weight' of {self.name or 'GroupedLinear'} holds {weight.storage_name}, the "
                    f"recipe in force wants {handle.storage_name}; enter autocast with the recipe of "
                    "quantized_model_init"
                )
            return grouped_storage_of(weight)
        cached: Any = self._fp8_workspaces.get("weight") if is_first_microbatch is False else None
        if cached is not None and cached[0] == handle.value:
            return cached[1]
        return None  # nothing kept, or kept for another recipe

    # -- where weight gradients go ------------------------------------------------------------------------------------

    def _weight_names(self) -> list[str]:
        return (
            ["weight"]
            if self.single_grouped_weight
            else [f"weight{group}" for group in range(self.num_gemms)]
        )

    def _wgrads(self, is_first_microbatch: bool | None, wanted: bool) -> list[LinearWgrad]:
        """Where the gradient of each weight goes, if any is wanted.

        Raises:
            RuntimeError: one should go to ``main_grad``, and there is none, or some are overwritten and some are not.
            ValueError: a ``main_grad`` of another shape than its weight, neither fp32 nor bf16.
        """
        made = [self._main_grad(name, wanted) for name in self._weight_names()]
        overwrites = [wgrad.overwrite for wgrad in made if wgrad.main_grad is not None]
        first = is_first_microbatch is True
        if not first and any(overwrites) and not all(overwrites):
            raise RuntimeError(
                f"overwrite_main_grad is set on some weights of {self.name or 'GroupedLinear'} only; set it on all or "
                "on none"
            )
        overwrite = first or any(overwrites)
        return [LinearWgrad(wgrad.main_grad, overwrite, wgrad.dummy) for wgrad in made]

    def _main_grad(self, name: str, wanted: bool) -> LinearWgrad:
        weight = self._parameters[name]
        assert weight is not None
        if not (wanted and self.fuse_wgrad_accumulation and weight.requires_grad):
            return LinearWgrad(None, False, "")
        main_grad, overwrite, dummy = main_grad_of(weight, name, self.name or type(self).__name__)
        if main_grad.shape != weight.shape or main_grad.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"main_grad of parameter {name!r} is {main_grad.dtype} {tuple(main_grad.shape)}; assign "
                f"torch.float32 or torch.bfloat16 {tuple(weight.shape)}"
            )
        return LinearWgrad(main_grad, overwrite, dummy)

    def _compute_waiting_wgrads(self) -> None:
        weights = self._parameters_of("weight")
        if not any(weight.requires_grad for weight in weights):
            return
        deferred, shape = self.wgrad_stores["weight"].pop(), (self.out_features, self.in_features)
        if self.fuse_wgrad_accumulation:
            wanted = [weight.main_grad if weight.requires_grad else None for weight in weights]  # type: ignore[attr-defined]
            add_to_main_grads_(deferred, wanted, shape)
            for weight in weights:
                if weight.requires_grad:
                    _mark_added_to_main_grad(weight)
        else:
            wgrad = compute_grouped_wgrad(deferred, shape, weights[0].dtype)
            _accumulate_each(weights, wgrad, self.single_grouped_weight)
        if deferred.grad_bias is not None:
            _accumulate_each(self._parameters_of("bias"), deferred.grad_bias, self.single_grouped_bias)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _checked_input(self, inp: Tensor, weight: Tensor) -> Tensor:
        """The input, cast where torch.autocast says so."""
        if isinstance(inp, (QuantizedTensorStorage, GroupedTensor)):
            raise TypeError(
                f"input is a {type(inp).__name__}; GroupedLinear quantizes its input itself, pass a plain tensor"
            )
        return checked_input(inp, self.in_features, "in_features", weight)

    def _checked_splits(
        self, splits: Sequence[int] | Tensor, x: Tensor, label: str = "m_splits"
    ) -> tuple[Tensor, bool]:
        """The splits on the device of ``x``, and whether they are known to sum to its rows."""
        if isinstance(splits, Tensor):
            if splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{label} is {splits.dtype} of shape {tuple(splits.shape)}; use torch.int32 or torch.int64 "
                    f"({self.num_gemms},)"
                )
            known = None
            if splits.device.type == "cpu" and not torch.compiler.is_compiling():
                known = splits.tolist()
        else:
            known = list(splits)
        length = splits.shape[0] if isinstance(splits, Tensor) else len(splits)
        if length != self.num_gemms:
            raise ValueError(
                f"{label} has {length} entries; give one for each of the {self.num_gemms} groups"
            )
        covered = False
        if known is not None:
            total = sum(known)
            if any(split < 0 for split in known) or total > x.shape[0]:
                raise ValueError(
                    f"{label} is {known}; use non-negative numbers whose sum is at most the {x.shape[0]} rows"
                )
            covered = total == x.shape[0]
        if isinstance(splits, Tensor):
            return splits.to(x.device, non_blocking=True), covered
        return torch.tensor(known, dtype=torch.int64).to(x.device, non_blocking=True), covered

    # -- state dict ---------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self._parameters["weight"]
        if isinstance(weight, GroupedTensor):
            destination[prefix + "weight"] = weight.detach().dequantize()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Either form of the parameters loads into either form."""
        converted = dict(state_dict)
        for kind in ("weight", "bias"):
            names = [f"{prefix}{kind}{group}" for group in range(self.num_gemms)]
            single = self._parameters[kind] is not None
            if single and all(name in converted for name in names):
                converted[prefix + kind] = torch.stack([converted.pop(name) for name in names])
            elif not single and prefix + kind in converted:
                converted.update(zip(names, converted.pop(prefix + kind).unbind(0)))
        super()._load_from_state_dict(converted, prefix, *args)


def rows_of_buffer(
    buffer: Tensor | None, label: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """A tensor that a result is written to, as a matrix of rows.

    Args:
        label: its name in messages. shape: (*lead, K), dtype and device that it must have.
    Raises:
        ValueError: it does not, is not contiguous, quantized, or wants a gradient.
    """
    if buffer is None:
        return None
    if isinstance(buffer, QuantizedTensor):
        raise ValueError(
            f"{label} is a {type(buffer).__name__}; results are not quantized, pass a plain tensor"
        )
    if buffer.shape != torch.Size(shape) or buffer.dtype != dtype or buffer.device != device:
        raise ValueError(
            f"{label} is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}; the result is {dtype} "
            f"{tuple(shape)} on {device}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"{label} has strides {buffer.stride()}; pass a contiguous tensor")
    if buffer.requires_grad:
        raise ValueError(
            f"{label} requires a gradient; pass a tensor that is only written to, such as {label}.detach()"
        )
    return buffer.view(-1, shape[-1])


def _accumulate_each(parameters: list[Tensor], grad: Tensor, single: bool) -> None:
    for parameter, own in zip(parameters, [grad] if single else grad.unbind(0), strict=True):
        if parameter.requires_grad:
            _accumulate(parameter, own)


def _sharded(in_features: int, out_features: int, parallel_mode: str | None, tp_size: int) -> tuple[int, int]:
    """Sizes of one rank's part."""
    if parallel_mode not in (None, "column", "row"):
        raise ValueError(f"parallel_mode is {parallel_mode!r}; use None, 'column' or 'row'")
    if parallel_mode is None:
        return in_features, out_features
    label, size = (
        ("out_features", out_features) if parallel_mode == "column" else ("in_features", in_features)
    )
    if size % tp_size:
        raise ValueError(
            f"{label} is {size}; parallel_mode={parallel_mode!r} needs a multiple of tp_size={tp_size}"
        )
    if parallel_mode == "column":
        return in_features, out_features // tp_size
    return in_features // tp_size, out_features


def _mark_partition(parameter: Any, kind: str, parallel_mode: str | None) -> None:
    """Say which dim of a parameter is sharded; the dim of the groups never is."""
    if parallel_mode is None or (kind == "bias" and parallel_mode == "row"):
        return
    from_end = 2 if kind == "weight" and parallel_mode == "column" else 1
    parameter.tensor_model_parallel = True
    parameter.partition_dim = parameter.dim() - from_end
    parameter.partition_stride = 1


def _give_every_group_a_slot(state: DelayedScalingState, groups: int) -> None:
    """Scales (kinds * G,) and histories (L, kinds * G) in the place of (kinds,) and (L, kinds)."""
    for direction in ("fwd", "bwd"):
        scale, history = getattr(state, f"scale_{direction}"), getattr(state, f"amax_history_{direction}")
        setattr(state, f"scale_{direction}", scale.repeat(groups))
        setattr(state, f"amax_history_{direction}", history.repeat(1, groups))


def _weight_quantizer(recipe: Recipe, name: str) -> Quantizer:
    return recipe.linear_handles(name).weight.both.quantizer


def _check_quantized_weight(recipe: Recipe, name: str, single: bool) -> None:
    quantizer = _weight_quantizer(recipe, name)
    if not single:
        raise NotImplementedError(
            "quantized_model_init needs all weights of a GroupedLinear in one parameter; pass "
            "single_grouped_parameter=True"
        )
    if quantizer._is_delayed() or grouped_layout(quantizer._storage_name) == "split":
        raise NotImplementedError(
            f"{quantizer!r} cannot make one grouped parameter; use a recipe with current scaling, MXFP8 or 128-block "
            "scaling for the weights"
        )
