"""``Sealable``: base of objects that may be set up until their first use, and are values afterwards."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import torch

from ._checks import shown

_ABSENT = object()


class Sealable:
    """Base of recipes and quantizers.

    A compiled graph, a plan or a tensor may rest on what such an object holds. So the first use seals it,
    and from then on an assignment raises instead of being missed.
    """

    # not in __dict__: no part of the value, and a copy starts unsealed; ``_key`` and ``_text`` say it once it is sealed
    __slots__ = ("_key", "_sealed", "_text")

    def _seal(self) -> None:
        """Freeze the fields. Traced code need not call it: the compiler hashes the values that it traces."""
        if not torch.compiler.is_dynamo_compiling():
            object.__setattr__(self, "_sealed", True)

    def _how_to_change(self, name: str) -> str:
        """Return the alternative to an assignment that comes too late."""
        raise NotImplementedError

    def _taken(self, name: str, value: Any) -> Any:
        """Return ``value`` as the field keeps it.

        Raises:
            AttributeError: what is called ``name`` is no part of the value, so it would be missed.
        """
        return value

    def _assigned(self, name: str) -> None:
        """Check the value that an assignment has made, and derive from it again; raising takes the assignment back."""

    def __setattr__(self, name: str, value: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            raise FrozenInstanceError(
                f"{type(self).__qualname__} is immutable in compiled code, so {shown(name)} cannot be assigned; "
                f"{self._how_to_change(name)}"
            )
        if getattr(self, "_sealed", False):
            raise FrozenInstanceError(
                f"{type(self).__qualname__} has been used and is immutable, so {shown(name)} cannot be assigned; "
                f"{self._how_to_change(name)}"
            )
        value = self._taken(name, value)
        before = vars(self).get(name, _ABSENT)
        object.__setattr__(self, name, value)
        try:
            self._assigned(name)
        except Exception:
            if before is _ABSENT:
                object.__delattr__(self, name)
            else:
                object.__setattr__(self, name, before)
            raise

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(
            f"{type(self).__qualname__} keeps its attributes; {shown(name)} cannot be deleted"
        )

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # a copy is not sealed
