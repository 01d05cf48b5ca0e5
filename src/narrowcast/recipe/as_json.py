"""Recipes as JSON: the class, and the fields that differ from its defaults."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from .._checks import article, of_number_format, shown, typed
from .base import Format, MMParams, QParams, Recipe
from .names import ALIASES, NAMES, recipe_from_name

_VALUES: dict[str, type] = {"MMParams": MMParams, "QParams": QParams}


def recipes_to_json(recipes: Mapping[str, Recipe | None]) -> str:
    """Return a recipe table by pattern as JSON; :func:`narrowcast.set_recipe` takes it.

    Raises:
        TypeError: no table, or a recipe holds a function, which has no JSON.
    """
    if not isinstance(recipes, Mapping):
        raise TypeError(f"recipes is {typed(recipes)}; pass a table, such as narrowcast.get_recipes(model)")
    return json.dumps(
        {pattern: _described(recipe, shown(pattern)) for pattern, recipe in recipes.items()}, indent=2
    )


LARGEST_TEXT = 2**24  # characters
_OBJECT = 'write an object from patterns to recipes, such as {"": "current"}'


def recipes_from_json(text: str) -> dict[str, Recipe | None]:
    """Return the recipe table of a JSON text, written by :func:`recipes_to_json` or by hand.

    Args:
        text: an object from patterns to recipes. A recipe is a name (:data:`narrowcast.recipe.NAMES`), null for high
            precision, or an object of its "type", a class or a name, and the fields that differ from the defaults.
    Raises:
        TypeError: ``text`` is no text.
        ValueError: the text is not a JSON object, repeats a key, has numbers that are not finite, an unknown recipe or
            field, a value that the recipe refuses, or more than 2**24 characters.
    """
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"text is {typed(text)}; pass the text of recipes_to_json, or {_OBJECT}")
    if len(text) > LARGEST_TEXT:
        raise ValueError(
            f"the recipes have {len(text)} characters, more than the {LARGEST_TEXT} that are read"
        )
    try:
        table = json.loads(text, object_pairs_hook=_object, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        remedy = "pass the text of the file" if str(text).endswith(".json") else _OBJECT
        raise ValueError(f"the recipes are not JSON: {error}; {remedy}") from error
    if not isinstance(table, dict):
        raise ValueError(f"the recipes are a JSON {type(table).__name__}; {_OBJECT}")
    return {pattern: _recipe(value, pattern) for pattern, value in table.items()}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{shown(next(name for name in names if names.count(name) > 1))} stands in an object twice"
        )
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _described(value: Any, where: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        defaults = _defaults(type(value))
        held = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare
        }
        settings = {
            name: one
            for name, one in held.items()
            if one != defaults[name] and not isinstance(defaults[name], (MMParams, QParams))
        }
        follows = type(value)(**settings)  # the parameters of its operands follow from its settings
        fields = {
            name: _described(one, f"{where}: {type(value).__name__}.{name}")
            for name, one in held.items()
            if one != defaults[name] or one != getattr(follows, name)
        }
        return {"type": type(value).__name__, **fields}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where} is {shown(value)}, which has no JSON; give recipes with functions in code")


_NO_JSON = "a CustomRecipe has no JSON: its factory is a function; give it in code"


def _defaults(cls: type) -> dict[str, Any]:
    if issubclass(cls, Recipe) and cls._family == "custom":
        raise TypeError(_NO_JSON)
    instance = cls()
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def _recipe(value: Any, pattern: str) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return recipe_from_name(value)
        except ValueError as error:
            alone = '. For a recipe of all layers write {"": {"type": ...}}' if pattern == "type" else ""
            raise ValueError(f"{shown(pattern)}: {error}{alone}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{shown(pattern)} is {shown(value)}; use a name, null or an object with a "type"')
    known = {**NAMES, **{alias: NAMES[name] for alias, (name, _) in ALIASES.items()}}
    names = tuple(known)
    known |= {cls.__name__: cls for cls in _subclasses(Recipe) if cls is not Recipe}
    cls, given = _class_and_fields(value, known, names, shown(pattern), "recipe type")
    if cls._family == "custom":
        raise ValueError(f"{shown(pattern)}: {_NO_JSON}")
    fields = dict(ALIASES[value["type"]][1]) if value["type"] in ALIASES else {}
    for name, default in _known_fields(cls, given, pattern).items():
        fields[name] = _field(given[name], default, f"{shown(pattern)}: {cls.__name__}.{name}")
    return _made(cls, fields, f"{shown(pattern)}: {cls.__name__}")


def _class_and_fields(
    value: dict[str, Any], known: dict[str, type], names: Collection[str], where: str, what: str
) -> tuple[type, dict[str, Any]]:
    use = f"use one of {', '.join(map(repr, names))}"
    if "type" not in value:
        key = next((key for key, one in value.items() if isinstance(one, str) and one in known), None)
        meant = f'did you mean "type" for {shown(key)}? ' if key is not None else ""
        example = json.dumps(next(iter(names)))
        raise ValueError(f'{where} has no "type"; {meant}{use}, as in {{"type": {example}}}')
    kind = value["type"]
    if not isinstance(kind, str) or kind not in known:
        lower, written = str(kind).lower(), {name.lower(): name for name in known}
        near = difflib.get_close_matches(lower, of_number_format(lower, written), 1, cutoff=0.8)
        alike = f"; the nearest: {shown(written[near[0]])}" if near else ""
        raise ValueError(f"{where} has {what} {shown(kind)}{alike}; {use}")
    return known[kind], {name: given for name, given in value.items() if name != "type"}


def _known_fields(cls: type, given: dict[str, Any], pattern: str) -> dict[str, Any]:
    """Return the defaults of the fields that are given."""
    defaults = _defaults(cls)
    unknown = sorted(given.keys() - defaults.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], defaults, 1) or sorted(defaults)
        raise ValueError(
            f"{shown(pattern)}: {cls.__name__} has no field {shown(unknown[0])}; it has {', '.join(near):.200}"
        )
    return {name: defaults[name] for name in given}


def _field(value: Any, default: Any, where: str) -> Any:
    """Return the value of a field, of the kind that its default is of."""
    if isinstance(default, Format):
        if value not in [one.value for one in Format]:
            names = ", ".join(repr(one.name) for one in Format)
            raise ValueError(f"{where} is {shown(value)}; use one of {names}")
        return Format(value)
    if isinstance(value, dict):
        cls, given = _class_and_fields(value, _VALUES, _VALUES, where, "type")
        fields = {
            name: _field(given[name], known, f"{where}.{name}")
            for name, known in _known_fields(cls, given, where).items()
        }
        if default is not None and not isinstance(default, cls):
            raise ValueError(f"{where} is {cls.__name__}; use {type(default).__name__}")
        return _made(cls, fields, where)
    if isinstance(default, (MMParams, QParams)):
        if isinstance(default, QParams) and value is None:
            return None
        raise ValueError(
            f"{where} is {shown(value)}; use an object with the type {shown(type(default).__name__)}"
        )
    kinds = {bool: (bool,), int: (int,), float: (int, float), str: (str, type(None))}
    wanted = kinds.get(type(default), (str, type(None), *([int, float] if default is None else [])))
    if type(value) not in wanted or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(
            f"{where} is {shown(value)}; use {' or '.join(article(kind.__name__) for kind in wanted)}"
        )
    return value


def _made(cls: type, fields: dict[str, Any], where: str) -> Any:
    try:
        return cls(**fields)
    except NotImplementedError:
        raise
    except Exception as error:  # a subclass may check its fields in any way
        raise ValueError(f"{where}: {error}") from error


def _subclasses(cls: type) -> list[type]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _subclasses(sub))]
