"""The works and words that `bench` may be asked for, checked before PyTorch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ..words import AUTO, DEVICES, find

RECIPES: tuple[str, ...] = ("delayed", "current", "block")
MODES: tuple[str, ...] = ("eager", "compiled", "graphs")
OPTIMIZERS: tuple[str, ...] = ("AdamW", "FusedAdam")
HEADS = ("bf16", "current", "block")  # recipes without state


class Work(NamedTuple):
    """A piece of work. ``sizes``: of a layer (rows, in, out, groups), or of a model, as its builder reads them."""

    name: str
    kind: str
    sizes: tuple[int, ...]


LAYERS = (
    Work("Linear 8192x4096->14336", "linear", (8192, 4096, 14336)),
    Work("Linear 8192x4096->4096", "linear", (8192, 4096, 4096)),
    Work("Linear 128x256->256", "linear", (128, 256, 256)),
    Work("feed-forward 8192x4096/14336", "feed-forward", (8192, 4096, 14336)),
    Work("grouped 8x(4096->14336), 16384 rows", "grouped", (16384, 4096, 14336, 8)),
    Work("grouped 32x(2048->1408), 16384 rows", "grouped", (16384, 2048, 1408, 32)),
)
# layers, width, hidden, heads, heads of keys, batch, tokens
MODELS = (
    Work("small: 12 layers of 1024", "model", (12, 1024, 2816, 16, 8, 8, 1024)),
    Work("4 layers of the 8B shape", "model", (4, 4096, 14336, 32, 8, 4, 2048)),
    Work("1B: 16 layers of 2048", "model", (16, 2048, 8192, 32, 8, 4, 2048)),
)
TINY = (
    Work("Linear 32x64->64", "linear", (32, 64, 64)),
    Work("feed-forward 32x64/64", "feed-forward", (32, 64, 64)),
    Work("grouped 2x(64->64), 32 rows", "grouped", (32, 64, 64, 2)),
    Work("model: 1 layer of 64", "model", (1, 64, 64, 2, 1, 1, 32)),
)
ACCOUNT_MODELS: dict[str, Work] = dict(zip(("small", "8b-slice", "1b"), MODELS))
"""Models whose step `narrowcast bench account` takes apart."""
ACCOUNT_MODEL = "1b"
SUITES = {"layers": LAYERS, "models": MODELS, "all": LAYERS + MODELS, "tiny": TINY}


def works(suite: str, only: str = "") -> list[Work]:
    """Return the works of a suite whose name contains ``only``.

    Raises:
        BadParameter: nothing has that name.
    """
    found = [work for work in SUITES[suite] if only in work.name]
    if not found:
        raise typer.BadParameter(
            f"--only is {only!r:.60}, which no work of suite {suite!r:.60} has in its name; leave it out for all"
        )
    return found


def bench_settings(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the recipes and modes that the options of `bench` give; the device is found later.

    Raises:
        BadParameter: a value is wrong.
    """
    device, suite = given["device"], given["suite"]
    if suite == "account":
        if device == "cpu":
            raise typer.BadParameter(
                "bench account times the kernels of a GPU, and the device is cpu; run it on a GPU, or bench tiny here"
            )
        for name in ("only", "minutes", "resume"):
            if given[name]:
                raise typer.BadParameter(f"bench account takes no --{name}; leave it out")
    else:
        for name, option in (("model", "--model"), ("in_parts", "--in-parts")):
            if given[name]:
                raise typer.BadParameter(f"{option} is of bench account alone; leave it out")
    recipes, modes = (_words(given[name]) for name in ("recipe", "mode"))
    checks = (
        (recipes, RECIPES, "--recipe"),
        (modes, MODES, "--mode"),
        ([given["optimizer"]], OPTIMIZERS, "--optimizer"),
        ([given["head_recipe"]], HEADS, "--head-recipe"),
        ([given["model"] or ACCOUNT_MODEL], ACCOUNT_MODELS, "--model of bench account"),
        ([suite] if suite else [], (*SUITES, "account"), "SUITE"),
        ([device], DEVICES, "--device"),
    )
    for words, known, option in checks:
        for word in words or ([""] if option.startswith("--") else []):
            try:
                find(word, dict.fromkeys(known), option, suggest=option != "--device")
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
    for name in ("seconds", "minutes"):
        if not given[name] >= 0:
            raise typer.BadParameter(f"--{name} is {str(given[name]).removesuffix('.0')}; use 0 or more")
    if given["resume"] and given["out"] is None:
        raise typer.BadParameter("--resume needs --out, the folder with the results to go on from")
    earlier = (given["out"] or Path()) / ("account.csv" if suite == "account" else "bench.csv")
    if given["out"] is not None and not given["resume"] and earlier.exists():
        more = "" if suite == "account" else ", or add --resume"
        raise typer.BadParameter(f"{earlier} is of an earlier run; give --out another folder{more}")
    if suite != "account" and (suite or device != AUTO):
        works(suite or ("tiny" if device == "cpu" else "all"), given["only"])
    return recipes, modes


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
