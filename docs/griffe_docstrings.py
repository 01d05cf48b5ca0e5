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

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show a recipe's fields as parameters: ``recipe_class`` makes dataclasses."""
        for decorator in cls.decorators:
            if str(decorator.value) == "recipe_class":
                decorator.value = griffe.ExprName("dataclasses.dataclass")
