"""Decisions of a conversion, kept on the modules, so that a receipt can be made at any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..layers import RecipeOwner
from ..nn import LayerNorm, RMSNorm
from ..recipe import Recipe
from .find_modules import Found, FoundNorm, gemm_modules, norm_modules
from .stored import stored_as
from .swap import is_converted

# Reasons are plain attributes of the module: they are copied and pickled with it, and are in no state dict. A norm has
# two, since the 2-D weight of a norm over two dims is listed as that of a GEMM, too.
_REASON, _NORM_REASON = "_conversion_reason", "_norm_conversion_reason"

NOT_IN_ONLY = "not in only"


@dataclass(frozen=True)
class Decision:
    """The decision about a found module: "converted", "kept", or "narrowcast" if it already is one.

    ``stored``: how its weight is kept as one quantized copy, in the words of :func:`narrowcast.convert`; "" if it is
    not.
    """

    found: Found
    decision: str
    reason: str
    recipe: Recipe | None
    stored: str = ""

    @property
    def role_name(self) -> str:
        """The layer's name in quantizer roles: only where a recipe reads it, so that equal layers share a graph."""
        return self.found.name if self.recipe is not None and self.recipe.custom() else ""

    @property
    def module_type(self) -> str:
        """The module type in quantizer roles, now or after conversion."""
        return getattr(self.found.layer or self.found.module, "_module_type", "linear")


def record_reason(module: nn.Module, reason: str) -> None:
    """Keep the reason of a decision on the module that it is about."""
    module.__dict__[_REASON] = reason


def record_norm_reason(module: nn.Module, reason: str) -> None:
    """Keep the reason of a decision on the norm that it is about."""
    module.__dict__[_NORM_REASON] = reason


def drop_reasons(model: nn.Module) -> None:
    """Undo :func:`record_reason` for all modules of a model."""
    for module in model.modules():
        module.__dict__.pop(_REASON, None)
        module.__dict__.pop(_NORM_REASON, None)


def decision_so_far(found: Found) -> Decision:
    """Return the earlier decision about a module."""
    module = found.module
    if is_converted(module):
        stored = stored_as(module)
        reason = module.__dict__[_REASON] or found.note
        return Decision(found, "converted", reason, module.recipe, stored)  # type: ignore[arg-type]
    if isinstance(module, RecipeOwner):
        return Decision(found, "narrowcast", found.reason, module.recipe)
    reason = module.__dict__.get(_REASON) or found.reason
    return Decision(found, "kept", reason or "not converted; nc.convert(model, recipe) does", None)


def decisions_so_far(model: nn.Module) -> list[Decision]:
    """Return the earlier decisions about a model's modules with GEMM weights."""
    return [decision_so_far(found) for found in gemm_modules(model)]


def norms_so_far(model: nn.Module) -> Iterator[FoundNorm]:
    """Yield the norms that were converted, or were selected and kept, in the model's order."""
    plain = {id(found.module): found for found in norm_modules(model)}
    for name, module in model.named_modules():
        if is_converted(module) and isinstance(module, (LayerNorm, RMSNorm)):
            yield FoundNorm(name, module, type(module), "")
        elif id(module) in plain and _NORM_REASON in module.__dict__:
            yield plain[id(module)]._replace(layer=None, reason=module.__dict__[_NORM_REASON])
