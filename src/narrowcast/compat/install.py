"""Registers the modules of ``names`` as ``transformer_engine``, and its metadata.

One object on ``sys.meta_path`` does it: the import system asks it for modules, ``importlib.metadata`` for the package.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from .absent import EXTENSION, why_absent

_ROOT = "transformer_engine"
VERSION = "2.20.2+narrowcast"  # whose names these are


class _Metadata(importlib.metadata.Distribution):
    def __init__(self, package: str, version: str) -> None:
        self.package, self.known_as = package, version

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            name = self.package.replace("_", "-")
            return f"Metadata-Version: 2.1\nName: {name}\nVersion: {self.known_as}\n"
        return f"{self.package}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return path


class StandIn(importlib.metadata.DistributionFinder):
    """Tells the version of a package in whose place narrowcast's names are."""

    def __init__(self, package: str, version: str) -> None:
        self.package, self.version = package, version

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("-", "_").replace(".", "_") == self.package:
            yield _Metadata(self.package, self.version)


class _Aliases(StandIn):
    """Finds and fills the modules, and says of names that are absent what replaces them."""

    def __init__(self, modules: dict[str, dict[str, Any]], extension: dict[str, Any]) -> None:
        super().__init__(_ROOT, VERSION)
        self.modules = {f"{_ROOT}.{name}" if name else _ROOT: names for name, names in modules.items()}
        self.modules[EXTENSION] = extension

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.modules:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        owner, _, name = fullname.rpartition(".")
        if owner in self.modules:  # `from owner import name` comes here, too, where owner lacks the name
            raise ImportError(why_absent(owner, name), name=fullname)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        full = module.__name__

        def missing(name: str) -> Any:
            raise AttributeError(why_absent(full, name), name=name, obj=module)

        vars(module).update(self.modules[full], __version__=VERSION, __getattr__=missing)
        module.__doc__ = f"narrowcast's names where Transformer Engine has its own ({full})."


def _installed() -> _Aliases | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Aliases)), None)


def install_transformer_engine() -> None:
    """Make ``import transformer_engine`` give narrowcast, in this process.

    Call it before anything imports Transformer Engine. A second call changes nothing.

    Raises:
        RuntimeError: the real Transformer Engine is installed.
    """
    if _installed() is not None:
        return
    if _ROOT in sys.modules or importlib.util.find_spec(_ROOT) is not None:
        where = getattr(sys.modules.get(_ROOT), "__file__", None) or "found on sys.path"
        raise RuntimeError(
            f"install_transformer_engine(): Transformer Engine itself is installed ({where}), and two libraries cannot "
            "have one name; uninstall it, or import narrowcast by its own name"
        )
    from .names import EXTENSION_NAMES, MODULES  # imports the whole library

    aliases = _Aliases(MODULES, EXTENSION_NAMES)
    sys.meta_path.append(aliases)
    for name in aliases.modules:
        importlib.import_module(name)


def uninstall_transformer_engine() -> None:
    """Undo :func:`install_transformer_engine`; modules that have already imported names keep them."""
    aliases = _installed()
    if aliases is None:
        return
    sys.meta_path.remove(aliases)
    for name in aliases.modules:
        sys.modules.pop(name, None)
