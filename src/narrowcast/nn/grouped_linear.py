"""``GroupedLinear``: linear layers on consecutive groups of rows, such as the experts of a mixture, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._checks import flags
from .._keywords import refuse_keywords
from .._tracing import in_eager, refuse_in_transform
from ..autograd import grouped_linear, traced_grouped
from ..functional import calibrate_
from ..functional.collectives import group_name
from ..layers import GroupedLinearLayer
from ..layers.grouped_layer import plan_for_rows, rows_of_buffer
from ..layers.neutral import GroupedOptions, check_neutral
from ..layers.parameters import named_layer, parameter_dtype
from ..layers.tensor_parallel import checked_size, parallel_of
from ..recipe import Recipe, linear_plan
from ..state import THREAD
from ..upstream.modules import own_parameters
from ..upstream.tensors import in_transform

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GroupedLinear(GroupedLinearLayer):
    """y_g = x_g w_g^T + b_g for every group g of rows, quantized under its recipe or the current autocast's.

    Each group is quantized like a separate ``Linear``, all groups in one launch if the format has a kernel for it. Any
    number of tokens and any feature sizes work, and groups may be empty.

    Args:
        num_gemms: groups, each with a weight and a bias.
        in_features, out_features: sizes of the last dim of input and output, over all tensor-parallel ranks.
        bias: add a learned bias per group.
        recipe: the layer's own recipe, or its name; an ``autocast`` overrides it.
        parallel_mode: "column" shards ``out_features``, "row" shards ``in_features``, None neither. Nothing is
            communicated here.
        tp_size: ranks that share the layer.
        return_bias: return the biases with the output instead of adding them.
        params_dtype, dtype: dtype of the parameters; default: torch's default dtype.
        device: device of the parameters; default: the accelerator, or the CPU without one.
        init_method: fills one group's weight in place; default: normal with standard deviation 0.023.
        get_rng_state_tracker: returns an object whose ``fork()`` surrounds the initialization of a weight.
        rng_tracker_name: name of the state for ``fork``.
        name: name in the quantizer roles of a custom recipe.
        single_grouped_parameter: hold all weights in one parameter ``weight`` (num_gemms, out_features, in_features)
            and all biases in one ``bias`` (num_gemms, out_features), instead of ``weight0``, ``bias0`` and so on.
        single_grouped_weight, single_grouped_bias: the same for one of the two; None follows
            ``single_grouped_parameter``.
        fuse_wgrad_accumulation: as in ``Linear``, for every weight: each has a ``main_grad`` of its shape, a single one
            (num_gemms, out_features, in_features). Set ``overwrite_main_grad`` on all weights or on none.
        delay_wgrad_compute: as in ``Linear``; :meth:`backward_dw` computes the gradients of all groups.
        save_original_input: as in ``Linear``.
        tp_group: the processes that share every group's weight, instead of ``tp_size``.
        sequence_parallel: whether they share the rows. Nothing is communicated here.
        **options: Transformer Engine's other options, at the values that request nothing (``ub_*=False,
            symmetric_ar_type=None``).

    Raises:
        ValueError: a size or mode is impossible, or a bias is combined with tensor parallelism.
        NotImplementedError: an option of ``**options`` requests something.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str | None = None,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        name: str | None = None,
        single_grouped_parameter: bool = False,
        single_grouped_weight: bool | None = None,
        single_grouped_bias: bool | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        **options: Unpack[GroupedOptions],
    ) -> None:
        check_neutral("GroupedLinear", options, GroupedOptions)
        flags(single_grouped_parameter=single_grouped_parameter, return_bias=return_bias)
        ranks = tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            bias,
            dtype=parameter_dtype(params_dtype, dtype),
            device=device,
            recipe=recipe,
            parallel=parallel_of({"": parallel_mode}, *ranks),
            init_method=init_method,
            name=name,
            single_grouped_weight=_chosen(single_grouped_weight, single_grouped_parameter),
            single_grouped_bias=_chosen(single_grouped_bias, single_grouped_parameter),
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.sequence_parallel = sequence_parallel
        self.return_bias, self.save_original_input = return_bias, save_original_input
        if not (self.single_grouped_weight or self.single_grouped_bias):
            # group by group, as in Transformer Engine: optimizers know parameters by their number
            for name in [f"{kind}{group}" for group in range(num_gemms) for kind in ("weight", "bias")]:
                own_parameters(self)[name] = own_parameters(self).pop(name)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks that share every group's weight; the layer itself communicates nothing.

        Raises:
            ValueError: it does not have ``tp_size`` processes.
        """
        if tp_group is not None and checked_size(tp_group, 1) != self.tp_size:
            found = checked_size(tp_group, 1)
            raise ValueError(
                f"tp_group is of {found} processes, and the layer was made for tp_size={self.tp_size}"
            )
        if tp_group is not None:
            self._tp_group = group_name(tp_group, "tp_group")

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor = None,  # type: ignore[assignment]
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Apply the layers.

        Args:
            inp: (*lead, in_features): the rows of group 0, of group 1 and so on. A quantized matrix in MXFP8, or in
                blocks of 128 of a row, is read from its codes under recipes in blocks.
            m_splits: rows of each group: a list, or an int32 or int64 tensor (num_gemms,). The host does not read one
                on the device of ``inp``. Compiled code recompiles for every new list.
            is_first_microbatch: None quantizes the weights on every call; True quantizes them and keeps the result;
                False uses the kept ones. If a weight has changed, eager code quantizes again, compiled code raises.
            out: contiguous (*lead, out_features), dtype and device of ``inp`` (under ``torch.autocast`` its dtype). The
                output overwrites it, so it must not overlap ``inp``. Eager code returns a tensor that shares its
                memory.
            dgrad_out: contiguous, shape, dtype and device of ``inp``. The gradient of ``inp``, if any, overwrites it,
                and shares its memory in eager code. With ``delay_wgrad_compute`` it must not overlap ``inp``.

        Returns:
            (*lead, out_features), zero in rows beyond the sum of the splits; with ``return_bias`` a pair of output and
            list of biases.

        Errors are raised before any kernel runs.

        Raises:
            ValueError: the input's last dim is not ``in_features``; splits have another length, are negative, or exceed
                the rows (if the host knows them); ``out`` or ``dgrad_out`` does not fit; a ``main_grad`` has another
                shape or dtype; ``save_original_input`` is combined with delayed scaling.
            TypeError: splits are not ints, the input is quantized with scales that rows share, or its dtype is not the
                parameters', outside ``torch.autocast``.
            RuntimeError: the input is on another device, parameters are on the meta device, a quantized weight does not
                fit the recipe, or a ``main_grad`` is missing.
        """
        if unknown:
            refuse_keywords(self, unknown)
        weights, biases = self._parts_of("weight"), self._parts_of("bias")
        inp = self._checked_input(inp, weights)
        x = inp.reshape(-1, self.in_features)
        splits, covered = self._checked_splits(m_splits, x)
        out = rows_of_buffer(out, "out", (*inp.shape[:-1], self.out_features), inp.dtype, inp.device, inp)
        waits = inp if self.delay_wgrad_compute else None  # backward_dw reads the input after the backward
        dgrad_out = rows_of_buffer(dgrad_out, "dgrad_out", inp.shape, inp.dtype, inp.device, waits)
        added, grad = [] if self.return_bias else biases, torch.is_grad_enabled()
        recipe, needs_weight = self._recipe_in_force(), grad and self.wants_wgrad
        if in_transform():
            refuse_in_transform(named_layer(self))
        plan = linear_plan(
            recipe,
            self.name,
            grad and x.requires_grad,
            needs_weight,
            self.save_original_input,
            module_type=self._module_type,
        )
        if self.save_original_input and recipe is not None and not plan.save_original_input:
            self._warn_of_delayed_input()
        plan = plan_for_rows(plan, x.shape[0], self.num_gemms)
        calibrating = THREAD.state.calibrating
        if calibrating is not None:
            self._calibrate(calibrating, x, splits)
        scales = self._scales_of(("",), (plan,))[0]
        needs_bias = grad and any(bias.requires_grad for bias in added)
        args, groups = self._grouped_args(
            plan, scales, x.dtype, needs_bias, covered, is_first_microbatch, out, dgrad_out
        )
        operands = (inp, splits, weights, added, args, groups)
        y = (
            in_eager(grouped_linear, *operands)
            if plan.eager_only
            else (traced_grouped if is_dynamo_compiling() else grouped_linear)(*operands)
        )
        return (y, biases) if self.return_bias else y

    def _calibrate(self, recipe: Recipe, x: Tensor, splits: Tensor) -> None:
        """Collect the amax of every group's input under an autocast that only calibrates."""
        plan = linear_plan(recipe, self.name, True, True, module_type=self._module_type)
        if plan.input.unseen is not None:
            self._keep_states(("",), (plan,))
            calibrate_(x.detach(), splits, self.amax)


def _chosen(own: bool | None, common: bool) -> bool:
    return common if own is None else own
