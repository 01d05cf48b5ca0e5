"""Recipes as JSON: the class, and the fields that differ from its defaults."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

from .base import Format, MMParams, QParams, Recipe

_VALUES: dict[str, type] = {"MMParams": MMParams, "QParams": QParams}


def recipes_to_json(recipes: Mapping[str, Recipe | None]) -> str:
    """A table of recipes by pattern, as :func:`narrowcast.set_recipe` takes it.

    Raises:
        TypeError: a recipe that holds a function; that has no JSON.
    """
    return json.dumps({pattern: _described(recipe) for pattern, recipe in recipes.items()}, indent=2)


def recipes_from_json(text: str) -> dict[str, Recipe | None]:
    """The table that :func:`recipes_to_json` wrote.

    Raises:
        ValueError: no JSON object, an unknown recipe or field, or a value that the recipe refuses.
    """
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the recipes are no JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(
            f"the recipes are a JSON {type(table).__name__}; write an object from patterns to recipes"
        )
    return {pattern: _recipe(value, pattern) for pattern, value in table.items()}


def _described(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        defaults = _defaults(type(value))
        fields = {
            field.name: _described(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.compare and getattr(value, field.name) != defaults.get(field.name)
        }
        return {"type": type(value).__name__, **fields}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{value!r} has no JSON; give recipes with functions in code")


def _defaults(cls: type) -> dict[str, Any]:
    if issubclass(cls, Recipe) and cls._family == "custom":
        raise TypeError("a CustomRecipe has no JSON: its factory is a function; give it in code")
    instance = cls()
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def _recipe(value: Any, pattern: str) -> Any:
    if value is None:
        return None
    known = {cls.__name__: cls for cls in _subclasses(Recipe)}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in known:
        raise ValueError(f"{pattern!r} has recipe type {kind!r}; use one of {sorted(known)}")
    cls, fields = known[kind], {name: _field(given) for name, given in value.items() if name != "type"}
    unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(cls)})
    if unknown:
        raise ValueError(f"{pattern!r}: {kind} has no field {unknown[0]!r}")
    for name, default in _defaults(cls).items():
        if name in fields and isinstance(default, Format):
            fields[name] = Format(fields[name])
    return cls(**fields)


def _field(value: Any) -> Any:
    if isinstance(value, dict):
        return _VALUES[value["type"]](**{name: given for name, given in value.items() if name != "type"})
    return value


def _subclasses(cls: type) -> list[type]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _subclasses(sub))]
