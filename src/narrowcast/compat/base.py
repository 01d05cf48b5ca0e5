"""``TransformerEngineBaseModule``, for ``isinstance`` checks and subclasses."""

from __future__ import annotations

from typing import Any

from ..layers import RecipeOwner


def is_ub_initialized() -> bool:
    """Return False: there are no userbuffers."""
    return False


def using_cublasmp_backend() -> bool:
    """Return False: there are no userbuffers, of cuBLASMp or otherwise."""
    return False


class _Base(type):
    """Layers of this library count as instances of the base itself, not of what others derive from it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or (
            cls is TransformerEngineBaseModule and isinstance(instance, RecipeOwner)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or (
            cls is TransformerEngineBaseModule and issubclass(subclass, RecipeOwner)
        )


class TransformerEngineBaseModule(RecipeOwner, metaclass=_Base):
    """Every layer with a recipe is an instance; a class derived from it has ``recipe``, as the library's own layers.

    ``set_recipe`` and ``get_recipes`` find it. What Transformer Engine's has besides (``prepare_forward``,
    ``get_quantizers``, ...) is absent: quantize with ``recipe.resolve``, or with layers inside.

    Args:
        name: of the module.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._init_recipe_owner(None)
