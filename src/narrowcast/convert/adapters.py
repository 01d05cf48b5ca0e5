"""LoRA adapters of PEFT and the weights under them: merged without losing codes, and trained against the merge.

PEFT is not imported. Its layers are known by what they have: ``base_layer``, ``lora_A`` and ``get_delta_weight``. The
adapter's product is computed by PEFT's own methods.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from .. import _checks
from .._checks import a_kind, is_one_of, shown
from ..autograd import adapter_inputs, adapter_output, adapter_product
from ..functional import multiplies_with_product
from ..layers.described import ParameterRecord, describe_parameters, how_stored
from ..nn import Linear
from ..upstream.fsdp import class_before_sharding, reshard
from ..upstream.modules import own_children, own_parameters
from .experts import StackedExpertsLayer
from .requantize import requantized

Scales = Literal["kept", "new"]
_Records = dict[tuple[int, str], ParameterRecord]  # by the id of a layer and the name of its parameter


def merge_adapters(model: Any, scales: Scales = "kept") -> nn.Module:
    """Add a PEFT model's active LoRA adapters to the weights under them, in place, and return the base model.

    A weight that is stored quantized (``convert(weights=...)``, :func:`narrowcast.load_quantized`) is decoded in fp32,
    and the sum is quantized once. Other weights are added to in their dtype, as ``merge_and_unload`` does.

    Of a model that ranks share, all of them call it; each writes its part of the sum, in place.

    Args:
        model: as ``peft.get_peft_model`` returns it; LoRA or DoRA on linear layers.
        scales: "kept" quantizes a stored weight under the scales that it has, where they hold: an element that the
            adapter moves by less than half a step keeps its code. "new" computes all scales from the sum.
    Returns:
        The base model, without adapters.

    Raises:
        TypeError: ``model`` is no PEFT model.
        ValueError: ``scales`` is unknown, there is no active adapter, one is merged already, or one is of another kind;
            ranks share a weight that is stored or gathered as codes.

    Nothing changes if it raises.
    """
    _merge(model, scales)
    return model.unload()  # type: ignore[no-any-return]


def train_merged(model: Any, enabled: bool = True, scales: Scales = "kept") -> Any:
    """Train a PEFT model's LoRA adapters against their merge: the forward multiplies by the merged, quantized weight.

    Each forward merges as :func:`merge_adapters` does with these ``scales``. So the merged model gives the logits that
    training saw, bit for bit. The adapters get the gradients that they have beside the weight (a straight-through
    estimate), through their two thin GEMMs. It costs the merge of every layer in every forward.

    Args:
        model: as ``peft.get_peft_model`` returns it; LoRA without dropout on linear layers, not DoRA.
        enabled: False returns to adapters beside the weight.
        scales: as for :func:`merge_adapters`.
    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no PEFT model.
        ValueError: ``scales`` is unknown, an adapter is of another kind, is merged, or has dropout, or the model was
            sharded before.
        RuntimeError: a base weight trains, here or in a forward.
    """
    _check_scales(scales)
    masters = {one.layer for one in describe_parameters(model).values() if one.stored == "master"}
    for name, layer in list(_layers(model)):
        if enabled and layer.base_layer in masters:
            raise ValueError(
                f"the weight of {shown(name)} is gathered as codes, which are not what is merged; call train_merged "
                "before nc.distributed.shard"
            )
        for adapter in _active(layer):
            if adapter in getattr(layer, "lora_variant", ()):
                raise ValueError(
                    f"the adapter {shown(adapter)} of {shown(name)} is DoRA or another variant; use plain LoRA"
                )
            if not isinstance(layer.lora_dropout[adapter], nn.Identity) and layer.lora_dropout[adapter].p:
                raise ValueError(
                    f"the adapter {shown(adapter)} of {shown(name)} has dropout {layer.lora_dropout[adapter].p}, "
                    "which no merge has; use lora_dropout=0"
                )
        vars(layer).pop("forward", None)
        layer.trains_merged = enabled
        if enabled:
            _check_frozen(layer)
            layer.forward = MethodType(_FORWARDS[scales], layer)
    return model


def fuse_adapters(model: Any, enabled: bool = True) -> Any:
    """Compute a PEFT model's LoRA adapters with fewer passes over memory.

    The adapters multiply in the dtype of their input, bf16 or fp16, and train in their own. On Hopper, GEMMs of
    per-tensor FP8 add their products in fp32, before the one rounding. PEFT's own forward runs where a layer has DoRA
    or another variant, a bias in its adapter, or ``adapter_names``, and for other inputs.

    Args:
        model: as ``peft.get_peft_model`` returns it; LoRA on linear layers, converted or not.
        enabled: False returns to PEFT's forward.
    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no PEFT model.
        ValueError: an adapter is of another kind or merged, or none is active.
    """
    layers = list(_layers(model))
    for _, layer in layers:
        vars(layer).pop("forward", None)
        vars(layer).pop("shared_input", None)
        if enabled:
            layer.forward = MethodType(_forward_fused, layer)
            base = layer.base_layer
            layer.adds_in_gemm = isinstance(base, Linear) and multiplies_with_product(base.weight.device)
    if enabled:
        _shared_inputs(layers)
    return model


def unmerge_exactly(adapter: Any, name: str, base: Any) -> None:
    """Make an adapter's layer around a stored weight give back the weight's codes when it unmerges.

    PEFT subtracts what it added, and each of the two sums is rounded to codes.

    Args:
        adapter: a layer of PEFT; its ``merge`` and ``unmerge`` are replaced.
        name, base: a module of it; it counts only as the layer that the adapter is beside.
    """
    if torch.compiler.is_compiling():  # Dynamo registers modules that it cannot trace
        return
    if name != "base_layer" or not hasattr(adapter, "merged_adapters"):
        return
    of_peft = hasattr(base, "parameter_name")  # around experts
    if of_peft or isinstance(base, (Linear, StackedExpertsLayer)):
        adapter.merge = functools.partial(_merge_keeping_codes, adapter)
        adapter.unmerge = functools.partial(_unmerge_to_codes, adapter)


register_module_module_registration_hook(unmerge_exactly)


def _adapted_weight(adapter: Any) -> Any:
    """Return the weight that an adapter is of: PEFT's ``target_parameters`` name one of several."""
    return getattr(adapter.get_base_layer(), getattr(adapter, "parameter_name", "weight"))


def _merge_keeping_codes(adapter: Any, *args: Any, **options: Any) -> None:
    """Merge as PEFT does, with one rounding to codes for all adapters, and keep the codes of before."""
    weight = _adapted_weight(adapter)
    if how_stored(weight) != "codes":
        type(adapter).merge(adapter, *args, **options)
        return
    before, merged = vars(adapter).pop("_before_merge", (None, []))
    if not adapter.merged:
        before = weight.detach().clone()
    elif _fingerprint(weight) != merged:  # other code has written to it since
        before = None
    parameters: dict[str, Any] = own_parameters(adapter.get_base_layer())
    name = getattr(adapter, "parameter_name", "weight")
    values = nn.Parameter(weight.detach().dequantize(), requires_grad=False)
    count = len(adapter.merged_adapters)
    parameters[name] = values
    try:
        type(adapter).merge(adapter, *args, **options)
    finally:
        parameters[name] = weight
        if len(adapter.merged_adapters) > count:
            with torch.no_grad():
                weight.copy_(values)
        if before is not None and adapter.merged:
            adapter._before_merge = before, _fingerprint(weight)


@torch.no_grad()
def _unmerge_to_codes(adapter: Any) -> None:
    """Unmerge as PEFT does; if nothing else has written to the weight since it was merged, to the codes of before."""
    before, merged = vars(adapter).pop("_before_merge", (None, []))
    weight = _adapted_weight(adapter)
    restores = how_stored(weight) == "codes" and _fingerprint(weight) == merged
    type(adapter).unmerge(adapter)
    if restores:
        weight.copy_(before.to(weight.device))


def _fingerprint(weight: Any) -> list[int]:
    """Return sums of the words and of the last bytes of each buffer."""
    sums = []
    for buffer in weight.get_data_tensors():
        if buffer is not None:
            data = buffer.detach().reshape(-1).view(torch.uint8)
            whole = len(data) // 8 * 8
            sums += [int(data[:whole].view(torch.int64).sum()), int(data[whole:].sum())]
    return sums


def merged_later(model: Any, scales: Scales) -> tuple[nn.Module, dict[int, Callable[[], Any]]]:
    """Return the base model of a PEFT model, which stays as it is, and how to make what the adapters are added to.

    Returns:
        The base model, whose tensors are the model's. By the ids of those parameters of it that differ in the merged
        model, what makes this rank's part of the sum; all ranks that share a parameter call it.

    Raises:
        TypeError, ValueError: as for :func:`merge_adapters`.
    """
    copied = _sharing_copy(model)
    layers, records = _layers_to_merge(copied, scales)
    sums: dict[int, Callable[[], Any]] = {}
    for _, layer in layers:
        for attribute in ("weight", "bias"):
            record = records.get((id(layer.base_layer), attribute))
            if record is not None and (attribute == "weight" or _adds_to_bias(layer)):
                # another object, for the sum is not tied to what the parameter is
                own = nn.Parameter(record.parameter.detach(), requires_grad=False)
                own_parameters(layer.base_layer)[attribute] = own
                sums[id(own)] = functools.partial(_own_part, layer, attribute, records, scales)
    return copied.unload(), sums


def base_copy(model: Any) -> nn.Module:
    """Return the base model of a PEFT model, which stays as it is; tensors are shared."""
    copied = _sharing_copy(model)
    list(_layers(copied, merges=False))
    return copied.unload()  # type: ignore[no-any-return]


def _sharing_copy(model: Any) -> Any:
    """Return a copy of a model's modules with the tensors of the model, without FSDP2's part in them."""
    _check_model(model)
    reshard(model)
    copies: dict[int, nn.Module] = {}

    def copied(module: Any) -> Any:
        if id(module) not in copies:
            one = copies[id(module)] = object.__new__(class_before_sharding(module))
            vars(one).update(vars(module))
            for kept in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                vars(one)[kept] = copy.copy(vars(module)[kept])
            for name, child in own_children(module).items():
                own_children(one)[name] = None if child is None else copied(child)
        return copies[id(module)]

    return copied(model)


def has_adapters(model: Any) -> bool:
    """Return whether a model is PEFT's."""
    return callable(getattr(model, "unload", None)) and hasattr(model, "peft_config")


def layer_with_adapters(model: nn.Module) -> str | None:
    """Return the name of the first layer that PEFT has wrapped; None if there is none."""
    wrapped = (name for name, module in model.named_modules() if hasattr(module, "active_adapters"))
    return next((name for name in wrapped if hasattr(model.get_submodule(name), "base_layer")), None)


def _check_model(model: Any) -> None:
    _checks.module("model", model)
    if not has_adapters(model):
        raise TypeError(f"model is {a_kind(model)} without adapters; pass what peft.get_peft_model returned")


def _layers(model: Any, merges: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the LoRA layers of a model, with their names.

    Args:
        merges: False takes LoRA around other modules than linear layers, too.
    Raises:
        TypeError: ``model`` is no PEFT model.
        ValueError: an adapter of another kind, or one that is merged; or no active adapter.
    """
    _check_model(model)
    found = False
    for name, module in model.named_modules():
        layer: Any = module
        if not (hasattr(layer, "base_layer") and hasattr(layer, "active_adapters")):
            continue
        if not hasattr(layer, "lora_A") or (merges and not isinstance(layer.base_layer, nn.Linear)):
            raise ValueError(
                f"{shown(name)} is {type(layer).__name__} around {type(layer.base_layer).__name__}; LoRA and DoRA "
                "around nn.Linear are merged, others with merge_and_unload()"
            )
        if layer.merged:
            raise ValueError(f"{shown(name)} is merged already; call unmerge_adapter() first")
        if _active(layer):
            found = True
            yield name, layer
    if not found:
        raise ValueError("the model has no active LoRA adapter around a linear layer")


def _check_scales(scales: Any) -> None:
    if not is_one_of(scales, ("kept", "new")):
        raise ValueError(f"scales is {shown(scales)}; use 'kept' or 'new'")


def _active(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]


@torch.no_grad()
def _merge(model: Any, scales: Scales) -> None:
    """Add the active adapters to the weights under them, in place where ranks share one."""
    layers, records = _layers_to_merge(model, scales)
    _check_stays_sharded(model, [name for name, _ in layers])
    for _, layer in layers:
        with _whole(layer, records):
            sums = {"weight": _merged_weight(layer, scales), "bias": _merged_bias(layer)}
        for attribute, value in sums.items():
            record = records.get((id(layer.base_layer), attribute))
            if value is None or record is None:
                continue
            if record.spread_out:
                _take_parts(record, value, record.held.detach())
            else:
                setattr(layer.base_layer, attribute, nn.Parameter(record.spread(value), requires_grad=False))


def _layers_to_merge(model: Any, scales: Any) -> tuple[list[tuple[str, Any]], _Records]:
    """Return the LoRA layers of a model with their names, and what its parameters are across ranks."""
    _check_scales(scales)
    layers = list(_layers(model))
    reshard(model)
    records = {(id(one.layer), one.attribute): one for one in describe_parameters(model).values()}
    for name, layer in layers:
        _check_merges(name, layer, records[id(layer.base_layer), "weight"])
    return layers, records


def _take_parts(record: ParameterRecord, whole: Tensor, own: Tensor) -> Tensor:
    """Copy what this rank holds of a whole parameter into ``own``."""
    for part in record.parts:
        part.of(own).copy_(part.of_whole(whole))
    return own


@torch.no_grad()
def _own_part(layer: Any, attribute: str, records: _Records, scales: Scales) -> Any:
    with _whole(layer, records):
        value: Any = _merged_weight(layer, scales) if attribute == "weight" else _merged_bias(layer)
    record = records[id(layer.base_layer), attribute]
    return _take_parts(record, value, value.new_empty(record.held.shape)) if record.spread_out else value


def _check_stays_sharded(model: Any, layers: list[str]) -> None:
    """
    Raises:
        ValueError: FSDP2 gathers weights for a module that the base model is without.
    """
    wrappers = {"the PEFT model": model, "base_model": getattr(model, "base_model", None)}
    for name, module in {**wrappers, **{name: model.get_submodule(name) for name in layers}}.items():
        if class_before_sharding(module) is not type(module):
            raise ValueError(
                f"{name} was sharded by itself, and the merged model is without it; call fully_shard "
                "on blocks and on model.get_base_model(), or write files with narrowcast.export(merge=)"
            )


def _check_merges(name: str, layer: Any, record: ParameterRecord) -> None:
    """
    Raises:
        ValueError: the sum could not be put back.
    """
    _check_bias(layer)
    if record.spread_out and record.stored != "plain":
        how = "stored" if record.stored == "codes" else "gathered by narrowcast.distributed.shard"
        raise ValueError(
            f"the weight under {shown(name)} is {how} as codes, and ranks share it; save with "
            "narrowcast.distributed.save_checkpoint, load in one process into a model that is not sharded, and merge it"
        )
    if len(record.parts) > 1:
        raise ValueError(f"ranks share the weight under {shown(name)} in blocks; merge before it is split")


@contextmanager
def _whole(layer: Any, records: _Records) -> Iterator[None]:
    """Let the parameters of a layer, which ranks share, be whole in a block; all ranks enter it."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in layer.modules():
            for attribute, held in own_parameters(module).items():
                record = records.get((id(module), attribute))
                if record is not None and record.spread_out:
                    whole = nn.Parameter(record.whole(), requires_grad=False)
                    swapped.append((own_parameters(module), attribute, held))
                    own_parameters(module)[attribute] = whole
        yield
    finally:
        for owner, attribute, held in swapped:
            owner[attribute] = held


def _merged_weight(layer: Any, scales: Scales) -> Any:
    """Return the weight with the active adapters added, quantized if it is stored so."""
    weight = own_parameters(layer.base_layer)["weight"]
    stored = how_stored(weight) == "codes"
    value: Tensor = weight.detach().dequantize(dtype=torch.float32) if stored else weight.detach()  # type: ignore[union-attr,call-arg]
    for adapter in _active(layer):
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is None:
            value = value + layer.get_delta_weight(adapter).to(value.dtype)
        else:
            value = variant.merge_safe(layer, adapter, value)
    if not stored:
        return value
    if scales == "kept":
        return requantized(weight.detach(), value.float())  # type: ignore[union-attr]
    quantizer: Any = weight._quantizer  # type: ignore[union-attr]
    return quantizer.quantize(value.float(), dtype=weight.dtype)  # type: ignore[union-attr]


def _check_bias(layer: Any) -> None:
    for adapter in _adds_to_bias(layer):
        if layer.base_layer.bias is None:
            raise ValueError(f"the adapter {shown(adapter)} has a bias, and its layer has none to add it to")


def _adds_to_bias(layer: Any) -> list[str]:
    """Return the active adapters that have a bias of their own."""
    return [adapter for adapter in _active(layer) if getattr(layer, "lora_bias", {}).get(adapter)]


def _merged_bias(layer: Any) -> nn.Parameter | None:
    _check_bias(layer)
    bias = layer.base_layer.bias
    for adapter in _adds_to_bias(layer):
        added = bias + layer.lora_B[adapter].bias * layer.scaling[adapter]
        bias = nn.Parameter(added.to(bias.dtype), requires_grad=False)
    return bias  # type: ignore[no-any-return]


def _forward_kept(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _forward_merged("kept", layer, x, *args, **kwargs)


def _forward_new(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _forward_merged("new", layer, x, *args, **kwargs)


_FORWARDS = {"kept": _forward_kept, "new": _forward_new}


def _check_frozen(layer: Any) -> None:
    """
    Raises:
        RuntimeError: the layer under the adapter trains. The merge passes no gradient on to it.
    """
    for name, parameter in own_parameters(layer.base_layer).items():
        replaced = name == "weight" or any(getattr(layer, "lora_bias", {}).values())
        if parameter is not None and parameter.requires_grad and replaced:
            raise RuntimeError(
                f"the {name} {tuple(parameter.shape)} under an adapter has requires_grad=True, and would get no "
                "gradient through train_merged; freeze the base, or train beside it: train_merged(model, enabled=False)"
            )


def _forward_merged(scales: Scales, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a LoRA layer that trains against its merge."""
    active = [] if layer.merged else _active(layer)
    if not active:
        return layer.base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        _check_frozen(layer)
    with torch.no_grad():
        replaced = {"weight": _merged_weight(layer, scales), "bias": _merged_bias(layer)}
    names = {name: value for name, value in replaced.items() if value is not None}
    out: Tensor = torch.func.functional_call(layer.base_layer, names, (x, *args), kwargs)
    for adapter in active:
        lora_A, lora_B = layer.lora_A[adapter], layer.lora_B[adapter]
        beside = lora_B(lora_A(x.detach().to(lora_A.weight.dtype))) * layer.scaling[adapter]
        out = out + (beside - beside.detach()).to(out.dtype)  # zero, with the adapter's gradients
    return out


_SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read one input, in a module of Transformers."""


class _Shared:
    """Layers whose adapters read one input. The first call multiplies for all of them; ``products`` wait for theirs.

    If one is left over, another input has come: from then on each layer multiplies for itself.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.products: list[Any] = [None for _ in layers]
        self.inp: Tensor | None = None

    def goes_with(self, layer: Any, adapter: str) -> bool:
        """Return whether this layer is one of them, and all have this adapter alone."""
        alike = all(
            _active(one) == [adapter] and not one.merged and _is_plain(one, adapter) for one in self.layers
        )
        return alike and any(one is layer for one in self.layers)

    def of(self, layer: Any, x: Tensor, adapter: str) -> tuple[Tensor, Tensor]:
        """Return the input for a layer, and the product of its adapter."""
        at = next(i for i, one in enumerate(self.layers) if one is layer)
        if self.inp is not x or self.products[at] is None:
            if self.inp is not None:
                self.layers, self.products, self.inp = [layer], [None], None
                return adapter_inputs(x, [layer.lora_A[adapter].weight])[0]
            self.products = list(adapter_inputs(x, [one.lora_A[adapter].weight for one in self.layers]))
            self.inp = x
        made = self.products[at]
        self.products[at] = None
        if all(one is None for one in self.products):
            self.inp = None
        return made  # type: ignore[no-any-return]


def _shared_inputs(layers: list[tuple[str, Any]]) -> None:
    """Note on layers which others read the same input."""
    found = dict(layers)
    for name, layer in layers:
        own = name.rpartition(".")[2]
        names = next((names for names in _SHARING if own in names), ())
        beside = [name.removesuffix(own) + one for one in names]
        group = [found[one] for one in beside if one in found]
        if len(group) > 1 and layer is group[0]:
            shared = _Shared(group)
            for one in group:
                one.shared_input = shared


def _forward_fused(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a LoRA layer with its thin products fused."""
    active = [] if layer.merged else _active(layer)
    if (
        kwargs
        or x.dtype not in (torch.bfloat16, torch.float16)
        or not all(_is_plain(layer, a) for a in active)
    ):
        return type(layer).forward(layer, x, *args, **kwargs)  # type: ignore[no-any-return]
    read = [layer.lora_dropout[adapter](x) for adapter in active]
    alone = len(active) == 1 and read[0] is x
    if alone and getattr(layer, "adds_in_gemm", False):
        a, b = layer.lora_A[active[0]].weight, layer.lora_B[active[0]].weight
        made = layer.base_layer._with_adapter(x, a, b, layer.scaling[active[0]])
        if made is not None:
            return made  # type: ignore[no-any-return]
    products, given = [], x
    shared = getattr(layer, "shared_input", None)
    for adapter, dropped in zip(active, read, strict=True):
        if dropped is not given:
            product = adapter_product(dropped, layer.lora_A[adapter].weight)
        elif alone and shared is not None and shared.goes_with(layer, adapter):
            x, product = shared.of(layer, x, adapter)
        else:
            x, product = adapter_inputs(x, [layer.lora_A[adapter].weight])[0]
        products.append(product)
    out: Tensor = layer.base_layer(x, *args)
    for adapter, product in zip(active, products, strict=True):
        out = adapter_output(out, product, layer.lora_B[adapter].weight, layer.scaling[adapter])
    return out


def _is_plain(layer: Any, adapter: str) -> bool:
    """Return whether an adapter is two matrices and nothing else."""
    return adapter not in getattr(layer, "lora_variant", ()) and layer.lora_B[adapter].bias is None
