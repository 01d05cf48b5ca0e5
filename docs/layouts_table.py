"""Writes two tables into ``docs/serving.md``: the words of ``weights=`` beside the formats of ``nc.export``, from the
quantizers and formats of both, and the public layouts, from ``narrowcast.serving.read_formats.LAYOUTS``.

python docs/layouts_table.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from narrowcast import recipe
from narrowcast.convert.stored import DECODED
from narrowcast.formats import FLOAT8, FLOAT8_BLOCK_2D, FLOAT8_ROWS
from narrowcast.serving.formats import CHECKPOINT_FORMATS, compressed_tensors_config, fine_grained_config
from narrowcast.serving.read_formats import LAYOUTS, PublicLayout, layouts_of, parts_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "serving.md"
PINNED = dict(
    re.findall(
        r"^([\w-]+)==([\w.]+)$", (ROOT / "tests/neighbours/requirements.txt").read_text(), re.MULTILINE
    )
)
STORED = ("current", "delayed", "block")
"""Recipes of ``weights="stored"``."""
WORDS = {
    FLOAT8: "FP8, one scale",
    FLOAT8_ROWS: "FP8, a scale per row",
    FLOAT8_BLOCK_2D: "FP8, a scale per 128 x 128",
}


def says(layout: PublicLayout) -> str:
    """What its ``quantization_config`` has."""
    return ", ".join(
        f"`{name}: {'null' if value is None else value}`"
        for name, value in layout.config.items()
        if name != "quant_method"
    )


def named(layout: PublicLayout) -> str:
    """The names of its tensors, those that are read first."""
    read = layout.read
    weight = "gate_up_proj" if read.stacked else "weight"
    names = [f"`{read.name_of(weight, suffix)}`" for suffix in (read.codes, *read.scales)]
    return ", ".join(names)


def lies(layout: PublicLayout) -> str:
    """Codes and scales in words."""
    words = WORDS.get(layout.read.layout, layout.read.weights.upper())
    return "; ".join(filter(None, (words, layout.what)))


def written_as() -> dict[int, list[str]]:
    """The formats of ``nc.export`` that write a layout, by its place in the table."""
    found: dict[int, list[str]] = {}
    for name, kind in CHECKPOINT_FORMATS.items():
        for weights in kind.weights:
            config: Any = (
                fine_grained_config([]) if kind.fine_grained else compressed_tensors_config({"": weights}, [])
            )
            first = layouts_of(parts_of(config)[0])[0]
            found.setdefault(LAYOUTS.index(first), []).append(f"`{name}`")
    return {place: list(dict.fromkeys(names)) for place, names in found.items()}


def table() -> str:
    """One row for each layout."""
    lines = [
        "| package | `quant_method` | and | tensors | layout | becomes `weights=` | written by | compared with |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    written = written_as()
    for place, layout in enumerate(LAYOUTS):
        package = " ".join(filter(None, (layout.package, PINNED.get(layout.package))))
        becomes = layout.read.weights
        cells = (
            package,
            f"`{layout.config['quant_method']}`",
            says(layout),
            named(layout),
            lies(layout),
            f"`{becomes}`",
            ", ".join(written.get(place, [])) or "no format",
            " and ".join(filter(None, (layout.compared, "the formula"))),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def names() -> str:
    """One row for each way to keep frozen weights, with the formats that hold its copies as they are."""
    plans = {
        one: recipe.linear_plan(recipe.recipe_from_name(one), "", True, False, module_type="linear")
        for one in STORED
    }
    copies = {f'`"stored"`, recipe `"{one}"`': (plan.weight, plan.input) for one, plan in plans.items()}
    quantizers = {name: (weight.quantizer, inputs.quantizer) for name, (weight, inputs) in copies.items()}
    quantizers |= {f'`"{name}"`': (quantizer, None) for name, quantizer in DECODED.items()}
    lines = ["| `weights=` of `nc.convert` | `format` of `nc.export` |", "| --- | --- |"]
    lines.append('| `"plain"` | by the recipe, in the table above; `"bf16"` for plain weights |')
    for name, operands in quantizers.items():
        formats = [one for one, kind in CHECKPOINT_FORMATS.items() if kind.weight_format(*operands)]
        quoted = ", ".join(f'`"{one}"`' for one in formats)
        lines.append(f"| {name} | {quoted} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text()
    for place, made in (("names", names()), ("layouts", table())):
        pattern = rf"(?<=<!-- {place} -->\n).*?(?=<!-- end of {place} -->)"
        text = re.sub(pattern, lambda _, made=made: made, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
