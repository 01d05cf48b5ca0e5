"""One color per recipe and per other package, the same in every picture.

Recipes have the colors of Okabe and Ito, which color-blind readers tell apart, and other packages paler ones.
"""

from __future__ import annotations

import re

# on light pages, on dark pages
RECIPES = {
    "bf16": ("#767676", "#a0a0a0"),
    "delayed": ("#e69f00", "#e69f00"),
    "current": ("#0072b2", "#3d9be0"),
    "rowwise": ("#7f3c8d", "#b57bc4"),
    "mxfp8": ("#009e73", "#2cc295"),
    "block": ("#cc79a7", "#cc79a7"),
    "nvfp4": ("#d55e00", "#f07f2e"),
    "mxfp6": ("#56b4e9", "#8fd0f5"),
    "mxfp4": ("#8c6d1f", "#c2a14a"),
}
PEERS = {
    "torchao": ("#9785b8", "#a897cc"),
    "torchao rowwise": ("#c9bfe0", "#6f6091"),
    "te": ("#8a9a45", "#a8b866"),
    "liger": ("#b3a284", "#c9b79c"),
    "torch.compile": ("#a8a8a8", "#a8a8a8"),
    "unfused": ("#b79aa6", "#c4a9b4"),
    "torch": ("#d0d0d0", "#d0d0d0"),
}
PLAIN = ("#44546a", "#8fa3bd")  # narrowcast's work that belongs to no recipe
# of a step, in pictures that draw no recipe in its color
PARTS = {
    "matrix products": "#0072b2",
    "quantizing": "#cc79a7",
    "norms, activations": "#e69f00",
    "attention": "#56b4e9",
    "head, loss": "#009e73",
    "optimizer": "#8c6d1f",
    "other, GPU idle": "#999999",
}
# The colors of dark pages by those of light ones.
DARK = dict((*RECIPES.values(), *PEERS.values(), PLAIN))
# What pictures and benchmarks call a recipe besides its name.
_ALSO = {"given scale": "delayed", "128-block": "block", "1x128": "block", "per-tensor": "current"}


def color_of(contender: str, *, dark: bool = False) -> str:
    """Return the color of a contender: that of the package it starts with, else of the recipe it names.

    Args:
        contender: as a benchmark names it, such as ``torchao tensorwise`` or ``rmsnorm -> fp8 current``.
        dark: whether the page is dark.
    """
    package = re.split(r"[ :,]", contender)[0].lower()
    package = next((name for name in PEERS if " " in name and contender.startswith(name)), package)
    named = {**RECIPES, **{also: RECIPES[name] for also, name in _ALSO.items()}}
    found = [(contender.index(name), name) for name in named if name in contender]
    colors = named[min(found)[1]] if found else PLAIN
    return PEERS.get(package, colors)[dark]


def in_both_schemes(path: str, alternative: str, *, phone: bool = False) -> str:
    """Return the Markdown of a picture, of which light pages and dark ones show a file each.

    Args:
        path: of ``<path>-light.svg`` and ``<path>-dark.svg``.
        alternative: what the picture shows, for readers who do not see it.
        phone: whether narrow screens show ``<path>-phone-light.svg`` and ``<path>-phone-dark.svg`` instead.
    """
    narrow = "(max-width: 600px)"
    sources = [
        (f"{narrow} and (prefers-color-scheme: dark)", "-phone-dark"),
        (narrow, "-phone-light"),
    ] * phone
    sources.append(("(prefers-color-scheme: dark)", "-dark"))
    told = "".join(f'  <source media="{media}" srcset="{path}{end}.svg">\n' for media, end in sources)
    return f'<picture>\n{told}  <img src="{path}-light.svg" alt="{alternative}">\n</picture>'
