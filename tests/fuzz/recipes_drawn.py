"""Recipes: assigned as constructed, to JSON and back, and JSON that nobody of good will wrote."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import torch

import narrowcast as nc

from .programs import Difference, Invalid, Program, attempt, normal, refusal

R = nc.recipe
CLASSES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "MXFP6BlockScaling",
    "MXFP4BlockScaling",
    "NVFP4BlockScaling",
)
VALUES = (
    "true",
    "false",
    "null",
    "0",
    "1",
    "-1",
    "16",
    "1000000000000",
    "0.5",
    "NaN",
    "Infinity",
    '"max"',
    '"most_recent"',
    '"E4M3"',
    '"HYBRID"',
    '"range"',
    '"one"',
    '"high_precision"',
    "[]",
    "{}",
    '""',
    '{"type": "QParams"}',
    '{"type": "MMParams"}',
    '{"type": "object"}',
    "1e400",
    '"x"',
    "1.0",
    "true",
    "3",
    '{"type": "QParams", "amax_epsilon": NaN}',
    '{"type": "QParams", "amax_epsilon": -1}',
    '{"type": "QParams", "power_2_scale": true}',
    '{"type": ["QParams"]}',
)


def draw(rng: random.Random) -> Program:
    name = rng.choice(CLASSES)
    fields = [one.name for one in dataclasses.fields(getattr(R, name))]
    picked = rng.sample(fields, rng.randint(1, min(3, len(fields))))
    if rng.random() < 0.3:  # settings that go together: all of one prefix
        prefix = rng.choice(fields)[:8]
        picked = [one for one in fields if one.startswith(prefix)]
    same = rng.choice((None, 0, 1, 2))
    return {
        "do": rng.choice(("assign", "assign", "json", "json", "json", "text")),
        "name": name,
        "fields": [{"field": one, "choice": rng.randrange(1000) if same is None else same} for one in picked],
        "values": [rng.choice(VALUES) for _ in picked],
        "pattern": rng.choice(("", "layers.*", "**", "(", "\\\\")),
        "text": rng.choice(
            (
                "[" * 2000,
                "{",
                "",
                "null",
                '{"": 1}',
                '{"": {"type": 3}}',
                '{"": {}}',
                '{"": []}',
                '{"": {"type": "Recipe"}}',
                '{"": {"type": "CustomRecipe"}}',
                '{"": {"type": "__class__"}}',
                '{"a": ' * 3000,
                "9" * 5000,
                '{"": {"type": null}}',
            )
        ),
        "twice": rng.random() < 0.2,
    }


def _settings(program: Program) -> dict[str, Any]:
    """Values for the fields that the recipe's constructor takes, of the kind that the field has."""
    cls = getattr(R, program["name"])
    default = cls()
    values: dict[str, Any] = {}
    for one in program["fields"]:
        name = one["field"]
        held = getattr(default, name)
        values[name] = _other(name, held, one["choice"] or 0)
    return values


def _other(name: str, held: Any, choice: int) -> Any:
    if isinstance(held, bool):
        return bool(choice % 2)
    if isinstance(held, R.QParams):
        flags = {
            one.name: bool(choice >> i & 1)
            for i, one in enumerate(dataclasses.fields(R.QParams))
            if one.type == "bool"
        }
        flags.pop("derived", None)
        return R.QParams(**flags)
    if isinstance(held, R.MMParams):
        return R.MMParams(bool(choice % 2))
    if isinstance(held, R.Format):
        return list(R.Format)[choice % len(list(R.Format))]
    if isinstance(held, int):
        return (0, 1, 2, 4, 16)[choice % 5]
    if isinstance(held, str):
        return ("max", "most_recent", "range", "one", "MAE", "MSE")[choice % 6]
    return (None, "high_precision", "dequantized")[choice % 3] if name == "backward_override" else held


def assign(program: Program) -> None:
    """Fields that are assigned one after another give the recipe that a constructor makes of them."""
    cls, values = getattr(R, program["name"]), _settings(program)
    made, refused = attempt(lambda: cls(**values))
    recipe = cls()

    def one_by_one() -> Any:
        for name, value in values.items():
            setattr(recipe, name, value)
        hash(recipe)
        return recipe

    ours, error = attempt(one_by_one)
    if refused is not None:
        if not refusal(refused):
            raise refused
        if error is None:
            raise Difference(f"{program['name']}: assigned what the constructor refuses")
        if not refusal(error):
            raise error
        return
    if error is not None:
        raise Difference(
            f"{program['name']}: the constructor takes what assignments do not: {error}"
        ) from error
    if ours != made:
        raise Difference(f"{program['name']}: assigned, it is another recipe")


def from_json(program: Program) -> None:
    pattern = program["pattern"] or ""
    body = ", ".join(f'"{one["field"]}": {value}' for one, value in zip(program["fields"], program["values"]))
    again = ", " + body if program["twice"] and body else ""
    text = f'{{{json.dumps(pattern)}: {{"type": "{program["name"]}"{", " if body else ""}{body}{again}}}}}'
    table, error = attempt(lambda: R.recipes_from_json(text))
    if error is not None:
        if not refusal(error) or not isinstance(error, (ValueError, NotImplementedError)):
            raise error
        return
    if again:
        raise Difference("JSON with keys given twice is taken")
    written, error = attempt(lambda: R.recipes_to_json(table))
    if error is not None:
        raise error
    if R.recipes_from_json(written) != table:
        raise Difference("another recipe after a round trip through JSON")
    (recipe,) = table.values()

    def use() -> Any:
        layer = nc.Linear(16, 16, device="cpu", recipe=recipe)
        y = layer(normal(0, 16, 16).requires_grad_())
        y.sum().backward()
        return y

    y, error = attempt(use)
    if error is not None:
        if refusal(error):
            return
        raise error
    if not torch.isfinite(y).all():
        raise Difference("a recipe from JSON that gives no numbers")


def text(program: Program) -> None:
    _, error = attempt(lambda: R.recipes_from_json(program["text"] or ""))
    if error is not None and not (refusal(error) and isinstance(error, ValueError)):
        raise error


def run(program: Program) -> dict[str, float]:
    if program["name"] not in CLASSES:
        raise Invalid("no recipe")
    {"assign": assign, "json": from_json, "text": text}[program["do"]](program)
    return {}
