"""Adam and AdamW for quantized parameters, and with state of fewer bits than fp32."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from .._checks import a_kind, flags, function, is_one_of, module, not_among
from .._device import HIGH_PRECISION
from .._tracing import refuse_in_graphs, warn
from ..functional import adam_, adam_quantize_
from ..layers import WeightCodes, WrittenWeight
from ..reference import log_codes
from ..reference.adam import join, split
from ..tensors import DequantizingTensor, dequantized, local, spread_like
from ..upstream.fsdp import is_distributed
from .arguments import MOMENTS, STEP, check_loaded, check_numbers, check_state_dict, checked_parameters
from .stored import decode, encode

_MASTER = "master_param"
_CODES = torch.int8
_MOMENT_DTYPES = (*HIGH_PRECISION, torch.uint8, _CODES)


class _Tensors(NamedTuple):
    """The tensors of one parameter, as ``functional.adam_`` takes them."""

    weight: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    beside: Tensor | None
    ranges: Tensor | None
    count: Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with master weights for quantized and bf16 parameters, and small moments.

    One kernel reads and writes weights, moments and master weights as stored, fp32, bf16, fp16 or codes of groups, and
    computes in fp32 by PyTorch's formula (``reference.adam.step``). The bits are the same on a CPU and in compiled
    code. State with a scale per tensor is decoded before the step and encoded after it. Use ``capturable`` in compiled
    code.

    As in PyTorch, the bias correction of a parameter counts the steps in which it had a gradient. Parameters with
    gradients in the same steps share the tensor ``state[p]["step"]``, and are stepped together.

    The master weight of a quantized parameter starts as its unrounded initial value, if
    ``quantized_model_init(preserve_high_precision_init_val=True)`` kept it and the parameter still is its quantization;
    else as the dequantized value. Every step quantizes the parameter again from its master.

    Args:
        params: parameters or groups of them.
        lr: a float or, for ``capturable``, a tensor.
        betas, eps, weight_decay: as in PyTorch.
        amsgrad: must be False.
        bias_correction: correct the moments' bias in the first steps.
        adam_w_mode: decay weights apart from the gradient (AdamW), not through it.
        capturable: ``lr`` and the step count are tensors on the device, and no step waits for it: for CUDA graphs and
            ``torch.compile``.
        master_weights: keep a copy of every parameter that is not fp32, of ``master_weight_dtype``, and step the copy.
        master_weight_dtype: float32, or float16 with a scale per tensor.
        exp_avg_dtype, exp_avg_sq_dtype: float32, bfloat16, int8: signs and logarithms of groups of 128 elements
            (``reference.log_codes``), float16 with a scale, or uint8: E4M3 codes with a scale.
        use_decoupled_grad: read ``param.decoupled_grad`` instead of ``param.grad``.
        store_param_remainders: for bf16 parameters keep only the missing 16 bits of the master weight.
        set_grad_none: whether ``zero_grad()`` drops gradients; None means that it does.
        weight_codes: a model with recipes whose parameters these are. A step then also writes what the model's layers
            multiply, quantized weights in both directions, in the pass that has the weights in registers; training
            forwards and backwards quantize no weight. They keep two bytes of an element in FP8. Not under FSDP2, which
            gathers codes of its own, nor in compiled steps.
        stochastic_rounding: round bf16 parameters up or down at random (``reference.adam.round_at_random``), so that
            steps too small for bf16 are taken in the mean; without master weights.
    Raises:
        ValueError: a dtype is not listed, a rate, eps or decay is negative, or betas are outside [0, 1).
        RuntimeError: ``amsgrad``, remainders without fp32 master weights, stochastic rounding with them; when state is
            made, remainders of a parameter that is not bf16, or a quantized one without master weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        weight_codes: nn.Module | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        flags(
            amsgrad=amsgrad,
            bias_correction=bias_correction,
            adam_w_mode=adam_w_mode,
            capturable=capturable,
            master_weights=master_weights,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=store_param_remainders,
            set_grad_none=set_grad_none,
            stochastic_rounding=stochastic_rounding,
        )
        if amsgrad:
            raise RuntimeError("FusedAdam has no amsgrad; use torch.optim.AdamW(amsgrad=True)")
        check_numbers(lr, betas, eps, weight_decay)
        for name, dtype, allowed in (
            ("master_weight_dtype", master_weight_dtype, (torch.float32, torch.float16)),
            ("exp_avg_dtype", exp_avg_dtype, _MOMENT_DTYPES),
            ("exp_avg_sq_dtype", exp_avg_sq_dtype, _MOMENT_DTYPES),
        ):
            if not is_one_of(dtype, allowed):
                raise ValueError(f"{name} is {not_among(dtype, allowed)}")
        if store_param_remainders and not (master_weights and master_weight_dtype == torch.float32):
            raise RuntimeError(
                "store_param_remainders keeps the rest of fp32 master weights: it needs master_weights=True and "
                f"master_weight_dtype=torch.float32, got {master_weights} and {master_weight_dtype}"
            )
        if stochastic_rounding and master_weights:
            raise RuntimeError(
                "stochastic_rounding is for bf16 parameters without master weights; leave one out"
            )
        self.adam_w_mode, self.capturable = bool(adam_w_mode), capturable
        self.stochastic_rounding = stochastic_rounding
        self.master_weights, self.store_param_remainders = master_weights, store_param_remainders
        self.use_decoupled_grad = use_decoupled_grad
        self.set_grad_none = set_grad_none is not False
        self.dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            _MASTER: master_weight_dtype,
        }
        self._step_supports_amp_scaling = (
            True  # to GradScaler: during a step it sets grad_scale and found_inf
        )
        # The scale of each parameter's stored state by name; not state, since state dicts hold values.
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        # The ranges of each parameter's moments in codes, (moments, groups, 2); not state for the same reason.
        self._ranges: dict[Tensor, Tensor] = {}
        self._coded = [name for name in MOMENTS if self.dtypes[name] == _CODES]
        if weight_codes is not None:
            module("weight_codes", weight_codes)
        self._codes = None if weight_codes is None else WeightCodes(weight_codes)
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bool(bias_correction), "capturable": capturable}
        super().__init__(checked_parameters(params), defaults)
        if weight_codes is not None:
            own = {id(one) for group in self.param_groups for one in group["params"]}
            if not any(id(one) in own for one in weight_codes.parameters()):
                raise ValueError(
                    "weight_codes is a model of other parameters; pass the model that these are of"
                )
        self.write_weight_codes()

    @torch.no_grad()
    def write_weight_codes(self) -> None:
        """Quantize the weights of ``weight_codes`` as they are now, after other code has changed them."""
        if self._codes is not None:
            for weight in self._codes.weights():
                weight.quantize()
                weight.note()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with ``capturable`` its rate moves to the device of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable:
            device = next((p.device for p in group["params"]), None)
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device, copy=True)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or zero them, as ``set_grad_none`` says unless told here; decoupled ones are dropped."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
        if self.use_decoupled_grad:
            for p in self._parameters():
                p.decoupled_grad = None

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Make the state of a parameter: moments of zeros and, where it has one, the master weight.

        Raises:
            RuntimeError: as the class.
        """
        own = local(param)
        quantized = isinstance(own, DequantizingTensor)
        if quantized and not self.master_weights:
            raise RuntimeError(
                f"a parameter is {a_kind(own)}, which is too coarse for a step; use master_weights=True"
            )
        if store_param_remainders and not quantized and param.dtype != torch.bfloat16:
            raise RuntimeError(
                f"store_param_remainders needs parameters in torch.bfloat16, got {param.dtype}; put the others into an "
                "optimizer of their own"
            )
        if self._coded:
            shape = len(self._coded), log_codes.groups_of(own.numel()), 2
            self._ranges[param] = torch.zeros(shape, dtype=torch.float32, device=param.device)
        for name in MOMENTS:
            if name in self._coded:
                self.state[param][name] = torch.zeros_like(param, dtype=torch.uint8)
            else:
                self.set_scaled_state(param, name, torch.zeros_like(param, dtype=torch.float32))
        if store_param_remainders and not quantized:
            self.state[param][_MASTER] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights and (quantized or param.dtype != torch.float32):
            self.set_scaled_state(param, _MASTER, _initial_master(param))

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """Return the state of a parameter as fp32 values; what is stored where it is fp32.

        Args:
            state_name: "exp_avg", "exp_avg_sq", "master_param" or "step".
            skip_unscale: return what is stored as it is.
        Raises:
            KeyError: it has no such state.
        """
        stored = self.state[param][state_name]
        if skip_unscale or state_name == STEP:
            return stored
        if stored.dtype == torch.int16:
            return join(param.detach(), stored)
        if state_name in self._coded:
            ranges = self._ranges[param][self._coded.index(state_name)]
            return spread_like(log_codes.decode(local(stored), ranges), stored)
        scale = self._scales.get(param, {}).get(state_name)
        return decode(stored, scale, state_name == "exp_avg_sq")

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store fp32 values as state of a parameter, in the dtype of that state.

        This also stores the low bits of a parameter's master weight; the parameter then takes the others.
        """
        state = self.state[param]
        if state_name in state and state[state_name].dtype == torch.int16:
            high, low = split(unscaled_state)
            param.copy_(high)
            state[state_name].copy_(low)
            return
        if state_name in self._coded:
            values = local(_placed_as(unscaled_state, param)).float()
            codes, ranges = log_codes.encode(values)
            local(state[state_name]).copy_(codes)
            self._ranges[param][self._coded.index(state_name)].copy_(ranges)
            return
        dtype = self.dtypes[state_name]
        stored, scale = encode(unscaled_state, dtype, state_name == "exp_avg_sq")
        kept = [(state, stored)]
        if scale is not None:
            kept.append((self._scales.setdefault(param, {}), scale))
        for where, value in kept:
            if state_name not in where:
                where[state_name] = value
            elif value is not where[state_name]:  # a CUDA graph reads it there
                where[state_name].copy_(value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **scaling: GradScaler | None) -> Any:  # type: ignore[override]
        """Take one step; return the result of ``closure``.

        Args:
            grad_scaler: act like ``grad_scaler.step(optimizer)``: the step divides gradients by its scale, and
                gradients that are not finite change nothing. Without ``capturable`` that waits for the device.
                Gradients may be fp16. Eager code only.
        Raises:
            RuntimeError: a sparse gradient, or an error of creating state.
        """
        # not a named argument: PyTorch's scaler would pass itself, with a warning, instead of its result
        scaler = scaling.pop("grad_scaler", None)
        if scaling:
            raise TypeError(f"step() got {', '.join(scaling)}; it takes closure and grad_scaler")
        loss = None
        if closure is not None:
            function("closure", closure, "a function that computes the loss and returns it")
            with torch.enable_grad():
                loss = closure()
        if scaler is not None:
            refuse_in_graphs(
                "compiled code takes no grad_scaler; call grad_scaler.step outside it", NotImplementedError
            )
            scaler.step(self)
            return loss
        inv_scale, found_inf = self._found_by_scaler()
        if found_inf is not None and not self.capturable:
            if found_inf.item():
                return loss
            found_inf = None
        codes = self._codes_of_step()
        if self.stochastic_rounding and not self.state:
            self._expect_halves()
        for group in self.param_groups:
            pairs = [(p, grad) for p, grad in self._gradients(group) if grad is not None]
            counts = self._advance(group, [p for p, _ in pairs], found_inf)
            for count in counts:
                together = [(p, grad) for p, grad in pairs if self.state[p][STEP] is count]
                if inv_scale is None and found_inf is None:
                    together = self._step_and_quantize(group, together, codes)
                self._step_group(group, together, inv_scale, found_inf)
        for weight in codes.values():  # what did not go with its parameter
            weight.quantize()
            weight.note()
        return loss

    def _expect_halves(self) -> None:
        dtypes = {p.dtype for p in self._parameters()}
        if torch.bfloat16 not in dtypes:
            names = ", ".join(sorted(map(str, dtypes)))
            warn(
                f"stochastic_rounding=True rounds bf16 parameters, and these are {names}: leave it out, or give bf16 "
                "ones, as model.bfloat16() makes"
            )

    def _codes_of_step(self) -> dict[Tensor, WrittenWeight]:
        """Return the weights whose codes are to be written, by their parameters; none of them without codes."""
        if self._codes is None:
            return {}
        refuse_in_graphs("compiled code takes no weight_codes; step outside it", NotImplementedError)
        return {weight.weight: weight for weight in self._codes.weights()}

    def _step_and_quantize(
        self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], codes: dict[Tensor, WrittenWeight]
    ) -> list[tuple[Tensor, Tensor]]:
        """Step parameters that share a count and have codes, and take them out of ``codes``; return the others."""
        alike: dict[Any, list[tuple[_Tensors, WrittenWeight]]] = {}
        others = []
        for p, grad in pairs:
            tensors = self._tensors(p, grad, (), True) if p in codes and self._is_plain(p) else None
            if tensors is None or not all(x.is_contiguous() for x in tensors[:5] if x is not None):
                others.append((p, grad))
                continue
            weight = codes.pop(p)
            key = weight.operand.value, tensors.beside is None, p.device
            alike.setdefault(key, []).append((tensors, weight))
        for those in alike.values():
            _run_and_quantize(group, those, self.adam_w_mode)
            for _, weight in those:
                weight.note()
        return others

    def _is_plain(self, p: Tensor) -> bool:
        """Return whether a step reads and writes a parameter and its state as they are stored."""
        if self.stochastic_rounding and p.dtype == torch.bfloat16:
            return False
        return _is_direct(p) and not self._coded and not self._scales.get(p)

    def _found_by_scaler(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the factor still to apply to gradients, and whether one of them is not finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        inv_scale = None if scale is None else scale.double().reciprocal().float()
        return inv_scale, found.float().reshape(()) if isinstance(found, Tensor) else None

    def _advance(self, group: dict[str, Any], params: list[Tensor], found_inf: Tensor | None) -> list[Tensor]:
        """Count this step for the parameters that have a gradient; the counts, each of parameters that share it."""
        counts: list[Tensor] = []
        made: list[Tensor] = []
        for p in params:
            state = self.state[p]
            if not state:
                self.initialize_state(p, self.store_param_remainders)
            if STEP not in state:
                device = p.device if self.capturable else torch.device("cpu")
                fresh = next((count for count in made if count.device == device), None)
                if fresh is None:
                    fresh = torch.zeros((), dtype=torch.float32, device=device)
                    made.append(fresh)
                state[STEP] = fresh
            if not any(count is state[STEP] for count in counts):
                counts.append(state[STEP])
        if len(params) < len(group["params"]):
            # those without a gradient stay where they are; they kept pace with the others until now
            left: list[tuple[Tensor, Tensor]] = []
            for p, grad in self._gradients(group):
                count = self.state[p].get(STEP) if grad is None and p in self.state else None
                if count is None or not any(count is moving for moving in counts):
                    continue
                copied = next((new for old, new in left if old is count), None)
                if copied is None:
                    copied = count.clone()
                    left.append((count, copied))
                self.state[p][STEP] = copied
        for count in counts:
            count += 1 if found_inf is None else 1 - found_inf.to(count.device)
        return counts

    def _gradients(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor | None]]:
        return [(p, self._gradient(p)) for p in group["params"]]

    def _gradient(self, p: Tensor) -> Tensor | None:
        grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
        if grad is not None and grad.is_sparse:
            raise RuntimeError("FusedAdam has no sparse gradients; use torch.optim.SparseAdam")
        return grad

    def _step_group(
        self,
        group: dict[str, Any],
        pairs: list[tuple[Tensor, Tensor]],
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Adam on parameters that share a count, in one operator where state is stored as that reads it."""
        alike: dict[Any, list[_Tensors]] = {}
        rounded: list[tuple[Tensor, Tensor]] = []
        for p, grad in pairs:
            direct = _is_direct(p)
            scaled = self._scales.get(p, ()) if self._scales else ()
            tensors = self._tensors(p, grad, scaled, direct)
            if scaled:  # one by one: there are fp32 copies of what has scales
                self._run(group, [tensors], inv_scale, found_inf)
                values = {_MASTER: tensors.weight, "exp_avg": tensors.first, "exp_avg_sq": tensors.second}
                for name in scaled:
                    self.set_scaled_state(p, name, values[name])
                if not direct:
                    p.copy_(tensors.weight)
                continue
            alike.setdefault((p.device, tensors.beside is None), []).append(tensors)
            if not direct:
                rounded.append((p, tensors.weight))
        for those in alike.values():
            self._run(group, those, inv_scale, found_inf)
        for p, weight in rounded:
            p.copy_(weight)

    def _run(
        self,
        group: dict[str, Any],
        parameters: list[_Tensors],
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """A step of parameters of one device, all or none of which have something beside them."""
        if any(is_distributed(tensors.weight) for tensors in parameters):
            parameters = [_Tensors(*[local(x) for x in tensors]) for tensors in parameters]
        weights, grads, first, second, beside, ranges, _ = ([*column] for column in zip(*parameters))
        adam_(
            weights,
            grads,
            first,
            second,
            beside if beside[0] is not None else [],
            ranges if ranges[0] is not None else [],
            inv_scale=inv_scale,
            found_inf=found_inf,
            decoupled=self.adam_w_mode,
            stochastic=self.stochastic_rounding,
            **_numbers_of(group, parameters[0].count),
        )

    def _tensors(self, p: Tensor, grad: Tensor, scaled: Container[str], direct: bool) -> _Tensors:
        """Return the tensors that a step reads and writes of a parameter: as stored, or fp32 values of scaled ones."""
        state = self.state[p]
        first, second = [
            self.get_unscaled_state(p, name) if name in scaled else state[name] for name in MOMENTS
        ]
        if _MASTER not in state:
            weight, beside = p.detach() if direct else p.detach().float(), None
        elif state[_MASTER].dtype == torch.int16:
            weight, beside = p.detach(), state[_MASTER]
        else:
            weight = self.get_unscaled_state(p, _MASTER)
            beside = p.detach() if direct else None
        ranges = self._ranges.get(p) if self._coded else None
        return _Tensors(weight, _placed_as(grad, p), first, second, beside, ranges, state[STEP])

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's state dict, with every state in fp32: independent of how state is stored."""
        state_dict = super().state_dict()
        state = {
            index: {name: self.get_unscaled_state(p, name).clone() for name in self.state[p]}
            for index, p in enumerate(self._parameters())
            if self.state.get(p)
        }
        groups = [
            {name: v.item() if name == "lr" and isinstance(v, Tensor) else v for name, v in g.items()}
            for g in state_dict["param_groups"]
        ]
        return {**state_dict, "state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load PyTorch's state dict; every state is stored in this optimizer's dtype.

        Also of ``torch.optim.Adam`` and ``AdamW``, which load this optimizer's, too, and of Transformer Engine, whose
        groups count steps. A quantized parameter whose master weight comes along, and that was loaded before, has the
        codes and the scales that it was saved with. So has a weight with ``weight_codes``.

        Raises:
            TypeError: ``state_dict`` is none, or has state that is no tensor.
            ValueError: the state of another optimizer, of other shapes, or of options that this one does not have.
        """
        check_state_dict(state_dict, self.param_groups)
        check_loaded(state_dict, self.adam_w_mode)
        rates = [group["lr"] for group in self.param_groups]
        before = {p: self.state[p][STEP] for p in self._parameters() if STEP in self.state.get(p, ())}
        super().load_state_dict(
            {**state_dict, "state": {}}
        )  # which would cast state to the parameters' dtype
        self._scales.clear()
        self._ranges.clear()
        groups = enumerate(state_dict["param_groups"])
        counted = [(index, number, group) for number, group in groups for index in group["params"]]
        counts: dict[Any, Tensor] = {}
        for (index, number, saved), p in zip(counted, self._parameters(), strict=True):
            given = state_dict["state"].get(index)
            if not given:
                continue
            self.initialize_state(p, self.store_param_remainders)
            for name in self.state[p]:
                if name in given:
                    self.set_scaled_state(p, name, given[name].detach().to(p.device, torch.float32))
            if isinstance(p, DequantizingTensor) and _MASTER in self.state[p]:
                _take_scales_of(p, self.get_unscaled_state(p, _MASTER))
            steps = float(given.get(STEP, saved.get(STEP)))
            device = p.device if self.capturable else torch.device("cpu")
            known = before.get(p)
            key = (
                number,
                steps,
                device,
                None if known is None else id(known),
            )  # a group counts its own steps
            if key not in counts:
                if known is None or any(count is known for count in counts.values()):
                    known = torch.zeros((), dtype=torch.float32, device=device)
                counts[key] = known.fill_(steps)  # in place: a CUDA graph reads what is there
            self.state[p][STEP] = counts[key]
        for group, rate in zip(self.param_groups, rates):
            group.pop(STEP, None)
            group["capturable"] = self.capturable
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if self.capturable:  # a CUDA graph reads it
                group["lr"] = rate.fill_(group["lr"])
        self.write_weight_codes()

    def _parameters(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from group["params"]


def _numbers_of(group: dict[str, Any], count: Tensor) -> dict[str, Any]:
    """Return the numbers of a step of a group."""
    numbers = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "bias_correction")}
    return {**numbers, "count": count if group["capturable"] else int(count)}


def _run_and_quantize(
    group: dict[str, Any], those: list[tuple[_Tensors, WrittenWeight]], decoupled: bool
) -> None:
    """As :meth:`FusedAdam._run`, and write the codes of the parameters, which have quantizers of one value."""
    codes, columns = [weight for _, weight in those], zip(*(tensors[:5] for tensors, _ in those))
    weights, grads, first, second, beside = (
        [part for x, weight in zip(column, codes) if x is not None for part in weight.matrices(x)]
        for column in columns
    )
    adam_quantize_(
        weights,
        grads,
        first,
        second,
        beside,
        [buffer for weight in codes for buffer in weight.buffers_of_matrices()],
        codes[0].operand.quantizer,
        decoupled=decoupled,
        **_numbers_of(group, those[0][0].count),
    )


def _is_direct(p: Tensor) -> bool:
    """Return whether a step reads and writes a parameter as it is stored."""
    return p.dtype in HIGH_PRECISION and not isinstance(local(p), DequantizingTensor)


def _placed_as(grad: Any, p: Any) -> Tensor:
    """Return a gradient on the ranks as its parameter is, in a dtype that a step reads."""
    if is_distributed(p) and grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return grad if grad.dtype in HIGH_PRECISION else grad.float()


def _initial_master(param: Tensor) -> Tensor:
    """Return the initial master weight of a parameter, fp32."""
    if not isinstance(local(param), DequantizingTensor):
        return param.detach().float()
    if not isinstance(param, DequantizingTensor):  # a shard, which does not have the value that was kept
        return dequantized(param, torch.float32)
    rounded = param._plain(torch.float32)
    kept = param.get_high_precision_init_val()
    if kept is None:
        return rounded
    requantized = param._quantized(kept.to(param.device))._plain(torch.float32)
    # A parameter that was loaded or changed since is not the quantization of what was kept.
    return kept.to(param.device, torch.float32, copy=True) if torch.equal(requantized, rounded) else rounded


def _take_scales_of(param: Any, master: Tensor) -> None:
    """Quantize a loaded parameter from its master weight, as the step before the checkpoint did, where values agree.

    Checkpoints hold decoded values in the dtype of the parameter, whose rounding moves a scale that is found from them;
    the tolerance is that rounding, far below the distance of two codes.
    """
    before, from_master = param._plain(torch.float32), param._quantized(master)._plain(torch.float32)
    if torch.allclose(from_master, before, rtol=2 * torch.finfo(param.dtype).eps, atol=0):
        param.copy_(master)
