"""Write the pages of the reference: one per topic, with every public class and function of its modules.

``site_hooks.py`` adds the pages when the site is built; mkdocstrings fills them from signatures and docstrings. A name
is public if ``narrowcast.__all__`` or the ``__all__`` of a module in ``TOPICS`` lists it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import reference_cli
from docstrings import as_markdown


class Topic(NamedTuple):
    """A page: its title, the rooms whose top-level names it holds, the modules that it holds whole, what is first."""

    title: str
    rooms: tuple[str, ...]
    modules: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


LAYERS = (
    "nc.Linear",
    "nc.LayerNormLinear",
    "nc.LayerNormMLP",
    "nc.TransformerLayer",
    "nc.MultiheadAttention",
    "nc.DotProductAttention",
    "nc.RMSNorm",
    "nc.LayerNorm",
    "nc.GroupedLinear",
    "nc.MoERouter",
)
"""Layers by use."""

TOPICS = {
    "layers": Topic("Layers", ("nn",), ("nn",), LAYERS),
    "conversion": Topic("Conversion and recipes per layer", ("convert", "layers"), ("convert",)),
    "recipes": Topic("Recipes", ("recipe", "custom_recipes", "roles"), ("recipe", "custom_recipes")),
    "contexts": Topic("Contexts, checkpoints and random states", ("state", "_determinism")),
    "quantizers": Topic("Quantizers", ("quantizers", "formats")),
    "tensors": Topic("Quantized tensors", ("tensors",)),
    "attention": Topic("Attention", ("attention",)),
    "moe": Topic("Mixture of experts", ("moe",)),
    "ops": Topic("Operations", ("ops",), ("ops",)),
    "losses": Topic("Losses", ("losses",)),
    "optimizers": Topic("Optimizers", ("optimizers",), ("optimizers",)),
    "distributed": Topic("Distributed", ("distributed",), ("distributed",)),
    "graphs": Topic("CUDA graphs and offloading", ("graphs", "offload")),
    "inspect": Topic("Watch, bisect, policy", ("inspect",), ("inspect", "policy")),
    "serving": Topic("Serving and export", ("serving",), ("serving",)),
    "dynamo": Topic("Values in compiled graphs", ("dynamo",), ("dynamo",)),
    "compat": Topic("Transformer Engine's names", ("compat",), ("compat",)),
    "machine": Topic("Machine and versions", ("_device", "_installed")),
    "testing": Topic("Tests of your own", ("testing",), ("testing",)),
}


class Entry(NamedTuple):
    """A public class or function: what users write, and where it is defined."""

    shown: str
    path: str


INTERNAL = {
    "LinearPlan",
    "Mode",
    "eager_only",
    "linear_plan",
    "nearest_recipe",
    "remember",
    "share_plans",
    "tensor_type_at",
}
"""Names of ``recipe.__all__`` that other rooms of the library use."""


def public_names(module: Any) -> list[str]:
    """Return ``__all__``, or the names that the module defines."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def candidates(topic: Topic) -> Iterator[tuple[str, Any]]:
    """Yield what users write for each name of a topic, and its value."""
    package = importlib.import_module("narrowcast")
    for name in package.__all__:
        value = getattr(package, name)
        if str(getattr(value, "__module__", "")).split(".")[1:2] in [[room] for room in topic.rooms]:
            yield f"nc.{name}", value
    for name in topic.modules:
        module = importlib.import_module(f"narrowcast.{name}")
        prefix = "nc" if getattr(package, name) is module else "narrowcast"  # nc.convert is the function
        for public in public_names(module):
            if public not in INTERNAL:
                yield f"{prefix}.{name}.{public}", getattr(module, public)


def anchor(shown: str, value: Any) -> str:
    """Return the name by which a page's address and links find a value: as users write it, if griffe finds it so.

    To griffe a name is the module of the same name that holds it: ``narrowcast.state.autocast``.
    """
    if not shown.startswith("nc.") or value.__module__.endswith(f".{value.__name__}"):
        return f"{value.__module__}.{value.__qualname__}"
    return shown.replace("nc.", "narrowcast.", 1)


def entries(topic: Topic) -> list[Entry]:
    """Return the classes and functions of a topic, in the order of the ``__all__`` that list them."""
    found: dict[Any, Entry] = {}
    for shown, value in candidates(topic):
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(
            "narrowcast."
        ):
            found.setdefault(value, Entry(shown, anchor(shown, value)))
    order = {name: at for at, name in enumerate(topic.first)}
    return sorted(found.values(), key=lambda entry: order.get(entry.shown, len(order)))


def summary(entry: Entry) -> str:
    """Return the first sentence of a name's docstring, as a cell of a table."""
    module, _, name = entry.path.rpartition(".")
    text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])|:$", " ".join(as_markdown(text).partition("\n\n")[0].split()))[
        0
    ]
    return sentence.rstrip(".:").replace("|", "\\|")


def names(topic: Topic) -> list[str]:
    """Return the lines of a topic's table of names."""
    lines = ["| name | what it is |", "| --- | --- |"]
    lines += [f"| [`{entry.shown}`][{entry.path}] | {summary(entry)} |" for entry in entries(topic)]
    return ['<div class="names" markdown>', "", *lines, "", "</div>"]


def index() -> str:
    """Return the Markdown of the page that lists the topics."""
    lines = ["# Reference", "", "`nc` is `import narrowcast as nc`.", "", "| page | names |", "| --- | --- |"]
    for name, topic in TOPICS.items():
        links = (f"[`{entry.shown.rsplit('.', 1)[-1]}`][{entry.path}]" for entry in entries(topic))
        lines.append(f"| [{topic.title}]({name}.md) | {', '.join(links)} |")
    lines.append("| [Command line](command-line.md) | every command and option of `narrowcast` |")
    return "\n".join([*lines, ""])


def page(topic: Topic) -> str:
    """Return a page's Markdown: a table of names, and a directive of mkdocstrings for each."""
    lines = [f"# {topic.title}", "", *names(topic), ""]
    for entry in entries(topic):
        label = entry.shown.rsplit(".", 1)[-1]
        lines += [
            f"::: {entry.path}",
            "    options:",
            f"      heading: {entry.shown}",
            f"      toc_label: {label}",
            "",
        ]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Return the Markdown of every page, by its path in the site."""
    topics = {f"reference/{name}.md": page(topic) for name, topic in TOPICS.items()}
    others = {"reference/index.md": index(), "reference/command-line.md": reference_cli.page()}
    return {**topics, **others}
