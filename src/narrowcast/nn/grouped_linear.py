"""``GroupedLinear``: linear layers on consecutive groups of rows, such as the experts of a mixture, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import DelayedTensors, GroupedLinearArgs, LinearNeeds, LinearWgrad, grouped_linear
from ..autograd.grouped_linear import add_to_main_grads_, calibrate_groups_, compute_grouped_wgrad
from ..functional.wgrad_store import DeferredWgrad
from ..quantizers import Quantizer
from ..recipe import LinearHandles, Recipe
from ..state import STATE, DelayedScalingState
from ..tensors import (
    GroupedTensor,
    GroupedTensorStorage,
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
    parameter_device,
)
from .stages import INIT_STD, checked_input, positive


class GroupedLinear(QuantizedModule):
    """y_g = x_g w_g^T + b_g for every group g of rows, quantized as the recipe in force says.

    Every group is quantized as a ``Linear`` of its own would quantize it; all of them in one launch where the format
    has a kernel for it. Any number of tokens and any feature sizes work, and groups may be empty.

    Args:
        num_gemms: groups, each with a weight and a bias.
        in_features, out_features: sizes of the last dim of input and output, over all tensor-parallel ranks.
        bias: add a learned bias per group.
        parallel_mode: "column": ``out_features`` is sharded, "row": ``in_features`` is; None: neither. Nothing is
            communicated here.
        tp_size: ranks that share the layer.
        return_bias: return the biases beside the output instead of adding them.
        params_dtype: dtype of the parameters; default: torch's default dtype.
        device: where the parameters live; default: the accelerator, or the CPU without one.
        init_method: fills one group's weight in place; default: normal with standard deviation 0.023.
        name: name in the quantizer roles of a custom recipe.
        single_grouped_parameter: hold all weights in one parameter ``weight`` (num_gemms, out_features, in_features)
            and all biases in one ``bias`` (num_gemms, out_features), instead of ``weight0``, ``bias0`` and so on.
        single_grouped_weight, single_grouped_bias: the same for one of the two; None follows
            ``single_grouped_parameter``.
        fuse_wgrad_accumulation: as in ``Linear``, for every weight: each has a ``main_grad`` of its shape, a single one
            (num_gemms, out_features, in_features). ``overwrite_main_grad`` is set on all weights or on none.
        delay_wgrad_compute: as in ``Linear``; :meth:`backward_dw` makes the gradients of all groups.
        save_original_input: as in ``Linear``.

    Raises:
        ValueError: a size or a mode that cannot be, or a bias with tensor parallelism. NotImplementedError: inside
        ``quantized_model_init`` with one parameter per group, or with a recipe that has no grouped format.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        single_grouped_parameter: bool = False,
        single_grouped_weight: bool | None = None,
        single_grouped_bias: bool | None = None,
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
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        single = single_grouped_parameter
        self.single_grouped_weight = single if single_grouped_weight is None else single_grouped_weight
        self.single_grouped_bias = single if single_grouped_bias is None else single_grouped_bias
        self.save_original_input, self._warned_of_delayed_input = save_original_input, False
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

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Apply the layers.

        Args:
            inp: (*lead, in_features); its rows are those of group 0, of group 1 and so on.
            m_splits: rows of each group: a list, or an int32 or int64 tensor (num_gemms,). One on the device of ``inp``
                is not read by the host. Compiled code is recompiled for every new list.
            is_first_microbatch: None quantizes the weights on every call; True quantizes them and keeps the result;
                False uses the kept ones without looking at the weights.

        Returns:
            (*lead, out_features), zero in rows beyond the sum of the splits; with ``return_bias`` a pair of output and
            list of biases.

        Raises (before any kernel):
            ValueError: the input's last dim is not ``in_features``; splits of another length, negative, or of more rows
            than there are, where the host knows them; a ``main_grad`` of another shape or dtype;
            ``save_original_input`` under delayed scaling. TypeError: a quantized input, or one whose dtype is not the
            parameters', outside ``torch.autocast``. RuntimeError: the input lives on another device, parameters are on
            the meta device, a quantized weight does not fit the recipe, or a ``main_grad`` is missing.
        """
        weights, biases = self._parameters_of("weight"), self._parameters_of("bias")
        inp = self._checked_input(inp, weights[0])
        x = inp.reshape(-1, self.in_features)
        splits, covered = self._checked_splits(m_splits, x)
        recipe = STATE.recipe
        handles = None if recipe is None else recipe.linear_handles(self.name)
        added = [] if self.return_bias else biases
        args = self._arguments(x, weights, added, recipe, handles, covered, is_first_microbatch)
        if recipe is None:
            self._calibrate(x, splits, weights)
        out, new_workspace = grouped_linear(x, splits, weights, added, args)
        if new_workspace is not None and handles is not None:
            self._fp8_workspaces["weight"] = (handles.weight.both.value, new_workspace)  # type: ignore[assignment]
        out = out.view(*inp.shape[:-1], self.out_features)
        return (out, biases) if self.return_bias else out

    def _arguments(
        self,
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        recipe: Recipe | None,
        handles: LinearHandles | None,
        covered: bool,
        is_first_microbatch: bool | None,
    ) -> GroupedLinearArgs:
        grad = torch.is_grad_enabled()
        delayed, save_original = DelayedTensors(), False
        if handles is not None and recipe is not None:
            delayed = self._delayed_tensors(handles.managed, recipe)
            save_original = self.save_original_input and self._can_save_original(recipe, handles)
        store = self.wgrad_stores.get("weight")
        return GroupedLinearArgs(
            quantizers=handles,
            delayed=delayed,
            numerics=self._numerics(recipe, x.dtype, weights[0].dtype, save_original),
            needs=LinearNeeds(
                inp=grad and x.requires_grad,
                weight=grad and any(weight.requires_grad for weight in weights),
                bias=grad and any(bias.requires_grad for bias in biases),
            ),
            covered=covered,
            workspace=None if handles is None else self._grouped_workspace(handles, is_first_microbatch),
            cache_weight=handles is not None
            and is_first_microbatch is not None
            and not isinstance(weights[0], GroupedTensor),
            out_features=self.out_features,
            in_features=self.in_features,
            num_gemms=self.num_gemms,
            bias_dtype=biases[0].dtype if biases else None,
            split_weights=not self.single_grouped_weight,
            split_biases=not self.single_grouped_bias,
            wgrads=self._wgrads(is_first_microbatch),
            store=store,
            ticket=None if store is None else store.ticket,
        )

    def _can_save_original(self, recipe: Recipe, handles: LinearHandles) -> bool:
        """Whether quantizing the input again in the backward gives what the forward saw.

        Raises:
            ValueError: under delayed scaling, whose scale may have moved since.
        """
        if not handles.input.both.delayed:
            return True
        if recipe.delayed():
            raise ValueError(
                "save_original_input=True does not work with DelayedScaling, whose scale moves between forward and "
                "backward; use another recipe or save_original_input=False"
            )
        if not self._warned_of_delayed_input and not torch.compiler.is_compiling():
            self._warned_of_delayed_input = True
            warnings.warn(
                "save_original_input is ignored: the custom recipe scales the input of "
                f"{self.name or 'GroupedLinear'} with delay",
                stacklevel=2,
            )
        return False

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

    def _wgrads(self, is_first_microbatch: bool | None) -> list[LinearWgrad]:
        """Where the gradient of each weight goes.

        Raises:
            RuntimeError: one should go to ``main_grad``, and there is none, or some are overwritten and some are not.
            ValueError: a ``main_grad`` of another shape than its weight, neither fp32 nor bf16.
        """
        names = self._weight_names()
        made = [self._wgrad(name, is_first_microbatch) for name in names]
        for name, wgrad in zip(names, made, strict=True):
            main_grad, shape = wgrad.main_grad, self._parameters[name].shape  # type: ignore[union-attr]
            if main_grad is None:
                continue
            if main_grad.shape != shape or main_grad.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(
                    f"main_grad of parameter {name!r} is {main_grad.dtype} {tuple(main_grad.shape)}; assign "
                    f"torch.float32 or torch.bfloat16 {tuple(shape)}"
                )
        overwrites = [wgrad.overwrite for wgrad in made if wgrad.main_grad is not None]
        if any(overwrites) and not all(overwrites):
            raise RuntimeError(
                f"overwrite_main_grad is set on some weights of {self.name or 'GroupedLinear'} only; set it on all or "
                "on none"
            )
        overwrite = any(overwrites)
        return [LinearWgrad(wgrad.main_grad, overwrite, wgrad.dummy) for wgrad in made]

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight and bias gradients of the oldest backward, of all groups; as in ``Linear``.

        Raises:
            RuntimeError: there was no backward since the last call.
        """
        if not self.need_backward_dw():
            return
        weights = self._parameters_of("weight")
        if any(weight.requires_grad for weight in weights):
            self._finish_wgrad(self.wgrad_stores["weight"].pop(), weights)
        for hook in self._wgrad_hooks:
            hook()

    def _finish_wgrad(self, deferred: DeferredWgrad, weights: list[Tensor]) -> None:
        shape = (self.out_features, self.in_features)
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

    def _checked_splits(self, m_splits: Sequence[int] | Tensor, x: Tensor) -> tuple[Tensor, bool]:
        """The splits on the device of ``x``, and whether they are known to sum to its rows."""
        if isinstance(m_splits, Tensor):
            if m_splits.dim() != 1 or m_splits.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"m_splits is {m_splits.dtype} of shape {tuple(m_splits.shape)}; use torch.int32 or torch.int64 "
                    f"({self.num_gemms},)"
                )
            known = None
            if m_splits.device.type == "cpu" and not torch.compiler.is_compiling():
                known = m_splits.tolist()
        else:
            known = list(m_splits)
        length = m_splits.shape[0] if isinstance(m_splits, Tensor) else len(m_splits)
        if length != self.num_gemms:
            raise ValueError(
                f"m_splits has {length} entries; give one for each of num_gemms={self.num_gemms}"
            )
        covered = False
        if known is not None:
            total = sum(known)
            if any(split < 0 for split in known) or total > x.shape[0]:
                raise ValueError(
                    f"m_splits is {known}; use non-negative numbers whose sum is at most the {x.shape[0]} rows"
                )
            covered = total == x.shape[0]
        if isinstance(m_splits, Tensor):
            return m_splits.to(x.device, non_blocking=True), covered
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
