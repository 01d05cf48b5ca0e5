"""The search for modules that hold a GEMM's weight, each convertible or with the reason why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import a_kind, article
from .._device import HIGH_PRECISION
from ..layers import GroupedLinearLayer, LinearLayer, RecipeOwner
from ..nn import LayerNorm, Linear, RMSNorm
from ..tensors import DequantizingTensor
from ..upstream.modules import own_parameters
from .blocks import Place, places_in_stacks
from .conv1d import Conv1DLayer
from .experts import EXPERTS, StackedExpertsLayer, runs_as
from .weight_reads import weight_readers

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
# in names of parameters that are added or looked up, not multiplied
_LOOKED_UP = ("embed", "position", "token")

ROLES = {
    "routers": "a router, whose rounding would change experts",
    "heads": "a head, whose rounding affects the loss directly",
    "small": "thin, so quantizing costs more than it gains",
}
"""What stays in high precision unless the option of :func:`narrowcast.convert` with that name is set, and why."""

_HEADS = ("lm_head", "output", "head")
# Below 32 on one side a GEMM mostly reads its large operand, and quantizing reads that once more; 16 and 32 are also
# what sizes are padded to. A model that is this small throughout has no side that is thin beside the other.
_THIN, _THIN_BESIDE = 32, 4

_OWN_CODE = "uses in its own code, which convert does not know"
COMPUTED = "its weight is computed by a parametrization"
_FAST_PATH = "without gradients, torch's fast path for nn.TransformerEncoderLayer reads its weight itself"


class Weight(NamedTuple):
    """A weight of GEMMs: the parameter, how many matrices it holds, (N, K) of each, and how many a token meets."""

    name: str
    tensor: Tensor
    groups: int
    rows: int
    columns: int
    per_token: float


class Found(NamedTuple):
    """A module with such weights. ``layer``: what it can become; None if it cannot, for the ``reason``.

    ``note``: what the user should know if the module is converted. ``role``: of :data:`ROLES`, why it stays, or "".
    ``place``: of the block that it is in, or None outside blocks.
    """

    name: str
    module: nn.Module
    weights: list[Weight]
    layer: type[LinearLayer] | None
    reason: str
    note: str = ""
    role: str = ""
    place: Place | None = None


def gemm_modules(model: nn.Module) -> Iterator[Found]:
    """Yield the modules of a model that hold GEMM weights, in order; one with two names has the first."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    modules, routers, heads = dict(model.named_modules()), router_modules(model), head_modules(model)
    readers = weight_readers(model)
    looked = [
        _look(name, module, parents.get(id(module)), readers.get(id(module), ""))
        for name, module in modules.items()
    ]
    weighted = [found for found in looked if found is not None and found.weights]
    places = places_in_stacks(model, {id(found.module) for found in weighted})
    for found in weighted:
        share, key = _share_of_tokens(found.name, modules), id(found.module)
        met = [weight._replace(per_token=weight.per_token * share) for weight in found.weights]
        is_one = {"routers": key in routers, "heads": key in heads, "small": _is_thin(met)}
        role = next((role for role in ROLES if is_one[role]), "")
        yield found._replace(weights=met, role=role, place=places.get(key))


def router_modules(model: nn.Module) -> set[int]:
    """Return the ids of the ``nn.Linear`` modules that choose experts or weigh them, by where they are.

    A router is beside the experts, in the module that holds both: as its child, or as the only linear layer of a child,
    such as ``gate.wg`` or ``router.classifier``. It has as many outputs as there are experts, and fewer than inputs
    unless the child is a router or gate by name (``wg``, ``expert_gate``). A child with one output, such as
    ``shared_expert_gate``, weighs what an expert adds.
    """
    found = set()
    for module in model.modules():
        children = dict(module.named_children())
        counts = {name: _experts_of(name, child) for name, child in children.items()}
        experts = {*filter(None, counts.values()), *_stacked(module)}
        if not experts:
            continue
        for name, child in children.items():
            if counts[name]:
                continue
            inside = [one for one in child.modules() if isinstance(one, nn.Linear)]
            named = "router" in f"{name} {type(child).__name__}".lower()
            gates = name == "wg" or name.endswith("gate")
            for linear in inside if named else inside[: len(inside) == 1]:
                outputs, inputs = linear.out_features, linear.in_features
                chooses = outputs in experts and (outputs < inputs or named or gates)
                if chooses or (outputs == 1 and linear is child):
                    found.add(id(linear))
    return found


def head_modules(model: nn.Module) -> set[int]:
    """Return the ids of the ``nn.Linear`` modules that make a model's outputs of its last activations.

    These are what ``get_output_embeddings()`` returns, of the model and of models in it, and what shares its weight
    with an ``nn.Embedding``. Where there is neither, it is the only ``nn.Linear`` in the model that is called
    ``lm_head``, or else ``output``, or else ``head``.
    """
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    found = {id(one) for one in linears.values() if id(own_parameters(one).get("weight")) in embedded}
    for module in model.modules():
        if hasattr(type(module), "get_output_embeddings"):
            head: Any = module.get_output_embeddings()  # type: ignore[operator]
            # an adapter wraps the head
            inside = head.modules() if isinstance(head, nn.Module) else ()
            found |= {id(one) for one in inside if isinstance(one, nn.Linear)}
    for name in () if found else _HEADS:
        called = [one for path, one in linears.items() if path.rpartition(".")[2] == name]
        if called:
            return {id(called[0])} if len(called) == 1 else set()
    return found


def _is_thin(weights: list[Weight]) -> bool:
    """Return whether a module's one matrix has few rows or columns, and many of the other: of few classes, or of low
    rank.
    """
    sides = [sorted((one.rows, one.columns)) for one in weights if one.groups == 1]
    return (
        len(sides) == len(weights) == 1 and sides[0][0] < _THIN and _THIN_BESIDE * sides[0][0] <= sides[0][1]
    )


def _experts_of(name: str, module: nn.Module) -> int:
    """Return how many experts a child of a mixture holds; 0 where it holds none."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        names = [name, type(module).__name__, *(type(one).__name__ for one in module.children())]
        return len(module) if len(module) > 1 and any("expert" in one.lower() for one in names) else 0
    if isinstance(module, GroupedLinearLayer):
        return int(module.num_gemms)
    counts = _stacked(module)
    if "expert" in f"{name} {type(module).__name__}".lower():
        told = (getattr(module, key, 0) for key in ("num_experts", "moe_num_experts", "num_local_experts"))
        counts |= {count for count in told if isinstance(count, int) and count > 1}
    return max(counts, default=0)


def _stacked(module: nn.Module) -> set[int]:
    """Return the sizes of dim 0 of a module's own 3-D parameters, which hold a matrix per expert."""
    if isinstance(module, _CONVOLUTIONS):
        return set()
    return {
        one.shape[0]
        for name, one in own_parameters(module).items()
        if one is not None
        and not isinstance(one, nn.parameter.UninitializedParameter)
        and one.dim() == 3
        and min(one.shape) > 1
        and not any(part in name for part in _LOOKED_UP)
    }


def _share_of_tokens(name: str, modules: dict[str, nn.Module]) -> float:
    """Return the share of tokens that reach a module: all, or for one of several ``experts`` the owner's choice."""
    inside = re.match(r"(?:(.*)\.)?experts\.\d+(?:\.|$)", name)
    owner = None if inside is None else modules[inside[1] or ""]
    experts = getattr(owner, "experts", None)
    if not isinstance(experts, nn.ModuleList):
        return 1.0
    return _chosen_experts(owner, getattr(owner, "gate", None), groups=len(experts)) / len(experts)


class FoundNorm(NamedTuple):
    """A norm of torch's. ``layer``: what it can become; None if it cannot, for the ``reason``."""

    name: str
    module: nn.Module
    layer: type[nn.Module] | None
    reason: str


def norm_modules(model: nn.Module) -> Iterator[FoundNorm]:
    """Yield the modules of a model that are torch's ``LayerNorm`` or ``RMSNorm``, in its order."""
    for name, module in model.named_modules():
        for torchs, ours in ((nn.LayerNorm, LayerNorm), (nn.RMSNorm, RMSNorm)):
            if isinstance(module, torchs) and not isinstance(module, ours):
                reason = _why_not_norm(module, torchs)
                yield FoundNorm(name, module, None if reason else ours, reason)


def _why_not_norm(module: Any, torchs: type[nn.Module]) -> str:
    if type(module).forward is not torchs.forward:
        return f"{type(module).__name__} has a forward of its own"
    if len(module.normalized_shape) != 1:
        return f"it normalizes over {len(module.normalized_shape)} dims"
    if module.eps is None:
        return "its eps depends on the dtype of the input"
    if torchs is nn.LayerNorm and module.weight is not None and module.bias is None:
        return "it has no bias"
    return _why_not_any(module, ("weight",))


def _look(name: str, module: nn.Module, parent: nn.Module | None, reader: str) -> Found | None:
    """Return a module with its weights; ``reader``: the class of a module that reads its weight itself, or ""."""
    if isinstance(module, torch.jit.ScriptModule):
        reason = "torch.jit compiled it; convert the model that it was made from"
        return Found(name, module, _matrices(module, parent), None, reason)
    if isinstance(module, RecipeOwner):
        weights, own = _weights_of_layer(module, parent), own_parameters(module)
        ours = "a layer of narrowcast already; set_recipe gives it a recipe"
        note = "" if all(weight.name in own for weight in weights) else COMPUTED
        return Found(name, module, weights, None, ours, note)
    if isinstance(module, nn.Linear):
        reason, weight = _why_not_linear(module, reader), module.weight
        if weight is None:
            return None
        lazy = isinstance(weight, nn.parameter.UninitializedParameter)
        sizes = (0, 0) if lazy else (weight.shape[0], weight.shape[-1])
        weights = [Weight("weight", weight, 1, *sizes, 1.0)]
        note = _FAST_PATH if isinstance(parent, nn.TransformerEncoderLayer) else ""
        return Found(name, module, weights, None if reason else Linear, reason, note)
    if _is_conv1d(module):
        reason = _why_not_any(module, ("weight",))
        stored: Any = module.weight
        weight = Weight("weight", stored, 1, stored.shape[1], stored.shape[0], 1.0)
        return Found(name, module, [weight], None if reason else Conv1DLayer, reason)
    if isinstance(module, _CONVOLUTIONS):
        return Found(
            name, module, _matrices(module, parent), None, "a convolution, for which narrowcast has no layer"
        )
    if isinstance(module, (*_LOOKUPS, nn.utils.parametrize.ParametrizationList)):
        return None
    return _look_at_parameters(name, module, parent)


def _look_at_parameters(name: str, module: nn.Module, parent: nn.Module | None) -> Found | None:
    """Return modules that multiply parameters of their own: experts in 3-D, and what nothing is known about."""
    weights = [
        weight
        for weight in _matrices(module, parent)
        if weight.tensor.shape[0] > 1
        and weight.rows > 1
        and not any(part in weight.name for part in _LOOKED_UP)
    ]
    kind = type(module).__name__
    if not any(weight.tensor.dim() == 3 for weight in weights):
        return Found(name, module, weights, None, f"a parameter that {kind} {_OWN_CODE}")
    layer = next((one for one in EXPERTS if one.is_kind_of(module)), None)
    if layer is None:
        return Found(name, module, weights, None, f"experts that {kind} {_OWN_CODE}")
    weights = _experts_weights(layer, module, weights)
    reason = _why_not_any(module, tuple(weight.name for weight in weights))
    return Found(name, module, weights, None if reason else layer, reason)


def _weights_of_layer(layer: RecipeOwner, parent: nn.Module | None) -> list[Weight]:
    """Return the weights of a layer of narrowcast; of a converted one as they were found before."""
    weights = _matrices(layer, parent)
    if isinstance(layer, StackedExpertsLayer):
        return _experts_weights(type(layer), layer, weights)
    return [_transposed(weight) for weight in weights] if isinstance(layer, Conv1DLayer) else weights


def _experts_weights(
    layer: type[StackedExpertsLayer], module: nn.Module, weights: list[Weight]
) -> list[Weight]:
    stack = layer.stack_of(module)
    weights = [weight for weight in weights if weight.name in stack.weights]
    if stack.every:
        weights = [weight._replace(per_token=float(weight.groups)) for weight in weights]
    return [_transposed(weight) for weight in weights] if stack.transposed else weights


def _transposed(weight: Weight) -> Weight:
    return weight._replace(rows=weight.columns, columns=weight.rows)


def _matrices(module: nn.Module, parent: nn.Module | None) -> list[Weight]:
    """Return the module's own parameters that may be matrices: (..., N, K), of a convolution (N, rest)."""
    weights = []
    for name, parameter in _parameters_read(module).items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            weights.append(Weight(name, parameter, 1, 0, 0, 1.0))
        elif parameter.dim() >= 2 and parameter.is_floating_point() and not name.endswith("bias"):
            if isinstance(module, _CONVOLUTIONS):
                groups, rows, columns = 1, parameter.shape[0], parameter[0].numel()
            else:
                groups, (rows, columns) = parameter.shape[:-2].numel(), parameter.shape[-2:]
            weights.append(
                Weight(name, parameter, groups, rows, columns, _met_by_a_token(module, parent, groups))
            )
    return weights


def _parameters_read(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by the names that the forward reads; of a computed one, the largest that it is computed of."""
    read = dict(module.named_parameters(recurse=False))
    if nn.utils.parametrize.is_parametrized(module):
        for name, parts in module.parametrizations.items():  # type: ignore[operator, union-attr]
            originals = list(parts.parameters(recurse=False))
            if originals:
                read[name] = max(originals, key=torch.numel)
    for name in [*read]:
        computed, _, kind = name.rpartition("_")
        # an attribute that torch.nn.utils.weight_norm, spectral_norm or prune computes
        if kind in ("g", "v", "orig") and isinstance(vars(module).get(computed), Tensor):
            parameter = read.pop(name)
            if kind != "g":
                read[computed] = parameter
    return read


def _met_by_a_token(module: nn.Module, parent: nn.Module | None, groups: int) -> float:
    """Return how many experts a router chooses per token, if the module, its config or its parent says so."""
    if isinstance(module, GroupedLinearLayer):  # a row has one group
        return groups / module.num_gemms
    if groups == 1:
        return 1.0
    around = (getattr(parent, name, None) for name in ("gate", "router"))
    return _chosen_experts(module, getattr(module, "config", None), parent, *around, groups=groups)


def _chosen_experts(*places: Any, groups: int) -> float:
    """Return how many of the experts a router chooses for a token, where one of these places says it; else all."""
    for place in places:
        for name in ("top_k", "num_experts_per_tok"):
            chosen = getattr(place, name, None)
            if isinstance(chosen, int) and 0 < chosen <= groups:
                return float(chosen)
    return float(groups)


# -- what a module must be to become a layer ------------------------------------------------------------------------


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it runs as a ``Conv1D`` of Transformers, by name and parts; that package is not imported."""
    weight, bias = own_parameters(module).get("weight"), own_parameters(module).get("bias")
    return (
        runs_as(module) == "Conv1D"
        and hasattr(module, "nf")
        and weight is not None
        and bias is not None
        and weight.dim() == 2
        and bias.shape == weight.shape[1:]
    )


def _is_torchaos(cls: type) -> bool:
    """Return whether torchao defines the class; that package is not imported."""
    return cls.__module__.partition(".")[0] == "torchao"


def _why_not_linear(module: nn.Module, reader: str) -> str:
    cls = type(module)
    if _is_torchaos(cls):
        return f"torchao made it {article(cls.__name__)}; convert the model instead, or leave it to torchao"
    if hasattr(module, "parametrizations"):
        return "its weight is parametrized"
    if cls.forward is not nn.Linear.forward:
        return f"{cls.__name__} has a forward of its own"
    if reader:
        return f"{reader} reads its weight itself"
    return _why_not_any(module, ("weight",))


def _why_not_any(module: nn.Module, weights: tuple[str, ...]) -> str:
    """Return the obstacle for a module of a suitable class, "" for none."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance; convert before what did that"
    for name in weights:
        weight = own_parameters(module).get(name)
        if weight is None:
            return f"{name} is not a parameter of its own (weight_norm, pruning or such)"
        if isinstance(weight, nn.parameter.UninitializedParameter):
            return "its sizes are not known before its first forward"
        if _is_torchaos(type(weight)):
            kind = type(weight).__name__
            return (
                f"torchao made its weight {article(kind)}; convert the model instead, or leave it to torchao"
            )
        if type(weight) is not nn.Parameter and not isinstance(weight, DequantizingTensor):
            hint = "; convert before sharding" if hasattr(weight, "to_local") else ""
            return f"{name} is {a_kind(weight)}{hint}"
        if weight.dtype not in HIGH_PRECISION:
            fix = (
                "; call model.float() or model.bfloat16() before"
                if weight.is_floating_point()
                else "; no recipe quantizes it, leave the model as it is"
            )
            return f"{name} is {weight.dtype}{fix}"
    return ""
