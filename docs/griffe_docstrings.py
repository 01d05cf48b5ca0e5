"""Let griffe, which mkdocstrings reads the library with, see docstrings as Markdown."""

from __future__ import annotations

from typing import Any

import griffe
from docstrings import as_markdown


class Docstrings(griffe.Extension):
    """Rewrite each docstring before it is parsed, and show recipes with their fields."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
        for decorator in obj.decorators if isinstance(obj, griffe.Class) else ():
            if (
                str(decorator.value) == "recipe_class"
            ):  # a dataclass, which griffe reads from the source alone
                decorator.value = griffe.ExprName("dataclasses.dataclass")
