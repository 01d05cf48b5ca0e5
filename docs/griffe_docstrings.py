"""Let griffe, which mkdocstrings reads the library with, see docstrings as Markdown."""

from __future__ import annotations

from typing import Any

import griffe
from docstrings import as_markdown


class Docstrings(griffe.Extension):
    """Rewrite each docstring before it is parsed, and recipes as dataclasses."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Hide ``**unknown``, which a function takes to name the right option in its error."""
        if "unknown" in func.parameters:
            del func.parameters["unknown"]

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show a recipe's fields as parameters: ``recipe_class`` makes dataclasses."""
        for decorator in cls.decorators:
            if str(decorator.value) == "recipe_class":
                decorator.value = griffe.ExprName("dataclasses.dataclass")

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show what a recipe's field starts with, not the function that makes it."""
        for module in pkg["recipe"].modules.values():
            for field in (field for cls in module.classes.values() for field in cls.attributes.values()):
                for argument in getattr(field.value, "arguments", ()):
                    if getattr(argument, "name", "") == "default_factory" and isinstance(
                        argument.value, griffe.ExprLambda
                    ):
                        field.value = argument.value.body
