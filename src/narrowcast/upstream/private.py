"""``private`` and ``entry``: take a private name, and record what happens on a release that lacks it.

PyTorch and Triton rename what is private without notice. Each use is recorded as an :class:`Entry`. On a release
without the name, it takes *another way with the same result*, or raises an :class:`UpstreamError` that names the
release and the way out.
Contract tests go through :data:`ENTRIES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

from .versions import NEWEST_TORCH, OLDEST_TORCH


class UpstreamError(RuntimeError):
    """This release of PyTorch or Triton lacks a private name that narrowcast needs."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One private name that narrowcast uses.

    Args:
        name: a dotted path from a module, such as ``torch._C._current_graph_task_id``, or a description of what has no
            path, such as ``node.meta['recompute']``.
        follows: the upstream file or issue that the use follows.
        without: what happens on a release that lacks the name: the other way with the same result, or the way out that
            the error names.
        falls_back: there is another way; otherwise the first use raises :class:`UpstreamError`.
        tried: the releases on which the contract test passed, such as "2.11-2.13", or "2.14-" up to the newest tested
            one; "" for all tested ones.
    """

    name: str
    follows: str
    without: str
    falls_back: bool = False
    tried: str = ""

    def error(self, found: str = "") -> UpstreamError:
        """Return the error for a release that lacks the name; ``found``: what was there instead."""
        owner = "triton" if self.name.startswith("triton") else "torch"
        release = getattr(sys.modules.get(owner), "__version__", "an unknown release")
        tested = f"PyTorch {OLDEST_TORCH} to {NEWEST_TORCH}"
        return UpstreamError(
            f"{owner} {release} has no {self.name} as narrowcast uses it{f' (found {found})' if found else ''}; "
            f"{self.without}; narrowcast was tested with {tested}, see `narrowcast doctor`"
        )

    def take(self) -> Any:
        """Return the object at the path that the name is, for files that must not load its module before it is used.

        Raises:
            UpstreamError: this release lacks it.
        """
        found = _find(self.name)
        if found is _NOTHING:
            raise self.error()
        return found

    def take_or(self, fallback: Any) -> Any:
        """Return the object at the path that the name is, or ``fallback`` on a release that lacks it."""
        found = _find(self.name)
        return fallback if found is _NOTHING else found


ENTRIES: dict[str, Entry] = {}
"""Every entry whose file was imported, by name."""

HIDDEN: set[str] = set()
"""Names that :func:`private` treats as absent: contract tests take an entry away with it before the first import."""


def entry(name: str, *, follows: str, without: str, falls_back: bool = False, tried: str = "") -> Entry:
    """Record a use that has no dotted path: a ``node.meta`` key, an operator's name, a closure, a frame's local.

    The caller checks that the name is there and raises :meth:`Entry.error` if it is not.
    """
    ENTRIES[name] = Entry(name, follows, without, falls_back, tried)
    return ENTRIES[name]


_REQUIRED: Any = object()
_NOTHING: Any = object()


def private(path: str, *, follows: str = "", without: str, fallback: Any = _REQUIRED, tried: str = "") -> Any:
    """Return the object at a dotted path and record its use.

    Args:
        path: from the module's full name on; modules on the way are imported.
        follows, without, tried: see :class:`Entry`; a name follows the file of its module unless told otherwise.
        fallback: what to return on a release that lacks the name; by default a stand-in whose every use raises.
    """
    follows = follows or f"{path.rpartition('.')[0].replace('.', '/')}.py"
    found = entry(path, follows=follows, without=without, falls_back=fallback is not _REQUIRED, tried=tried)
    value = _find(path)
    if value is not _NOTHING:
        return value
    return Absent(found) if fallback is _REQUIRED else fallback


def needed(value: Any) -> Any:
    """Return the result of :func:`private`, or raise its error at once: for names that the import requires."""
    if isinstance(value, Absent):
        value()
    return value


def _find(path: str) -> Any:
    if path not in HIDDEN:
        try:
            return _resolve(path)
        except (ImportError, AttributeError):
            pass
    return _NOTHING


def _resolve(path: str) -> Any:
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:count]))
    return value


class Absent:
    """A stand-in for a name that this release lacks; a call or an attribute raises :class:`UpstreamError`."""

    def __init__(self, of: Entry) -> None:
        self.__dict__["entry"] = of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self.__dict__["entry"].error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # copy, pickle and inspect look for these
            raise AttributeError(name)
        raise self.__dict__["entry"].error()

    def __bool__(self) -> bool:
        return False
