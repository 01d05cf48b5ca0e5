"""A receipt as text, and as a page with a picture."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from .._checks import counted
from .._table import aligned, below_headings, terminal_width, with_headings, wrapped_name
from ..upstream.compiler import repeats_every_gemm

if TYPE_CHECKING:
    from .receipt import GemmRecord, Memory, Receipt
    from .recording import RanGemm

Named = TypeVar("Named", "GemmRecord", "RanGemm")

_HEAD = ("name", "type", "shape", "decision", "recipe or reason", "parameters", "FLOPs", "padding")
_RIGHT = frozenset((5, 6, 7))
_WRAPPED = (0, 4)  # name, recipe or reason
_DROPPED = (5, 7, 1)  # on a narrow terminal, in this order: parameters, padding, type
_NARROWEST = 20  # of a wrapped column
_NAME = 30  # a name's width for which other columns are dropped
_BUDGET = (
    "activation_memory_budget is below 1: torch.compile takes quantized GEMMs for cheap and repeats each in the "
    "backward; set torch._functorch.config.is_non_builtin_to_include = True, too"
)
_COLORS = {"converted": "#2a78b8", "narrowcast": "#5aa9a0", "kept": "#b5b5b5"}


def as_text(receipt: Receipt, width: int = 0) -> str:
    """Return the table and its totals, without a package; equal layers are one row. ``width``: 0 is the terminal's."""
    width = width or terminal_width()
    lines = _fitted(_folded(receipt.gemms), width) if receipt.gemms else []
    totals = (
        textwrap.wrap(line, width, subsequent_indent="  ")
        for text in _totals(receipt)
        for line in text.split("\n")
    )
    return "\n".join([*lines, *itertools.chain.from_iterable(totals)])


def _folded(gemms: Sequence[GemmRecord]) -> list[tuple[str, ...]]:
    """Return a row per weight, or per group of weights that differ in the numbers of their names alone."""
    return [_row(group) for group in alike(gemms)]


def alike(records: Sequence[Named]) -> list[list[Named]]:
    """Return groups of records that differ in the numbers of their names alone."""
    groups: dict[Named, list[Named]] = {}
    for one in records:
        groups.setdefault(dataclasses.replace(one, name=re.sub(r"\d+", "*", one.name)), []).append(one)
    return list(groups.values())


def _row(group: Sequence[GemmRecord]) -> tuple[str, ...]:
    first = group[0]
    return (
        common_name([one.name for one in group]) or "(the model)",
        first.type,
        " x ".join(map(str, first.shape)),
        "no recipe" if first.decision == "converted" and not first.covered else first.decision,
        _recipe_or_reason(first),
        f"{sum(one.parameters for one in group):,}",
        f"{sum(one.flops_share for one in group):.1%}",
        _padding(first.padding),
    )


def _padding(share: float) -> str:
    """Return the share of multiplications that padding adds; from 1 on, how many times as many there are."""
    if share >= 1:
        return f"{1 + share:.1f} times"
    return f"{share:.1%}" if share else ""


def common_name(names: Sequence[str]) -> str:
    """Return one name for names that differ in numbers: with their ranges, or with their count if several differ."""
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"(\d+)", name) for name in names]
    different = [place for place, values in enumerate(zip(*parts)) if len(set(values)) > 1]
    common = list(parts[0])
    for place in different:
        common[place] = "*"
    if len(different) > 1:
        return f"{''.join(common)} ({len(names)})"
    numbers = sorted(int(part[different[0]]) for part in parts)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    common[different[0]] = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return "".join(common)


def _fitted(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """Return the lines of a table that is no wider, if it can be: without columns, with names and reasons wrapped.

    Names that do not fit stand below what they have in common.
    """
    columns = list(range(len(_HEAD)))
    if not any(row[_HEAD.index("padding")] for row in rows):
        columns.remove(_HEAD.index("padding"))
    sizes = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    name, reason = _WRAPPED

    def room() -> int:
        """Return what is left for names and reasons."""
        return (
            width
            - sum(sizes[column] for column in columns if column not in _WRAPPED)
            - 2 * (len(columns) - 1)
        )

    headings = [""] * len(rows)
    if sizes[name] + min(sizes[reason], _NARROWEST) > room():
        headings, rows = below_headings(rows)
        sizes[name] = max(len(row[name]) for row in (_HEAD, *rows))
    needed = max(
        min(2 * _NARROWEST, sizes[name] + sizes[reason]),
        min(sizes[name], _NAME) + min(sizes[reason], _NARROWEST),
    )
    for dropped in _DROPPED:
        if room() < needed and dropped in columns:
            columns.remove(dropped)
    longest = max(len(word) for row in rows for word in row[reason].split() or [""])
    least = min(
        max(_NARROWEST, longest), _NARROWEST + 2
    )  # a recipe's name and the comma behind it stay together
    most = {name: max(_NARROWEST, min(sizes[name], max(room() // 2, room() - least)))}
    most[reason] = max(least, room() - min(most[name], sizes[name]))
    lines, last = [[_HEAD[column] for column in columns]], ""
    above: dict[int, str] = {}
    for row, heading in zip(rows, headings):
        if heading:
            above[len(lines) + 1] = heading  # below the first row is a rule
        cells_of = {
            name: wrapped_name(row[name], most[name]),
            reason: textwrap.wrap(row[reason], most[reason]),
        }
        if row[reason] == last and len(cells_of[reason]) > 1:
            cells_of[reason] = ["as above"]
        last = row[reason]
        cells = [cells_of.get(column, [row[column]]) for column in columns]
        lines += map(list, itertools.zip_longest(*cells, fillvalue=""))
    right = frozenset(place for place, column in enumerate(columns) if column in _RIGHT)
    return with_headings(aligned(lines, right), above, width)


def _recipe_or_reason(one: GemmRecord) -> str:
    recipe = one.recipe
    if one.decision == "kept" or not recipe:
        return one.reason
    if one.decision == "narrowcast":  # the reason says how it gets one
        return recipe
    if one.stored:
        recipe += f", stored as {one.stored_as}" if one.stored_as else ", stored"
    return "; ".join(filter(None, (recipe, one.reason)))


def _totals(receipt: Receipt) -> list[str]:
    memory = receipt.memory
    converted = [one for one in receipt.gemms if one.decision == "converted"]
    plain = sum(not one.covered for one in converted)
    built = sum(one.decision == "narrowcast" for one in receipt.gemms)
    kept = [f"{one.name} ({one.reason})" for one in receipt.norms if one.decision == "kept"]
    norms = [
        f"norms: {len(receipt.norms) - len(kept)} converted" + (f"; kept: {', '.join(kept)}" if kept else "")
    ]
    same = memory.parameters == memory.parameters_before
    before = "as before" if same else f"before {_bytes(memory.parameters_before)}"
    verb = "would be converted (dry run)" if receipt.dry_run else "converted"
    counts = [f"{len(converted)} of {len(receipt.gemms)} weights {verb}"] if converted or not built else []
    counts += [f"{plain} without a recipe"] if plain else []
    counts += [f"{built} of {len(receipt.gemms)} weights in layers built from narrowcast"] if built else []
    return [
        f"{receipt.model}: {', '.join(counts)}",
        *(norms if receipt.norms else []),
        *(
            [f"did not run while recorded, and do not count: {', '.join(receipt.idle)}"]
            if receipt.idle
            else []
        ),
        f"under a recipe: {receipt.flops_covered:.1%} of the FLOPs per token in these GEMMs, "
        f"{receipt.parameters_covered:.1%} of {receipt.parameter_count:,} parameters",
        f"expected memory: parameters {_bytes(memory.parameters)}, {before}"
        + (_saved_by_converted(memory) if len(converted) > plain else "")
        + ("; not estimated: what layers built from narrowcast save" if built else ""),
        *_saved(receipt),
        *([_BUDGET] if repeats_every_gemm() else []),
        *([f"sharding:\n{receipt.sharding}"] if receipt.sharding is not None else []),
    ]


def _saved_by_converted(memory: Memory) -> str:
    told = ""
    if memory.quantized_weights:
        told += f"; quantized weights kept from forward to backward {_bytes(memory.quantized_weights)}"
    if memory.saved_per_token_before:  # frozen weights save none
        saved, before = _bytes(memory.saved_per_token), _bytes(memory.saved_per_token_before)
        told += f"; inputs saved per token {saved}, before {before}"
    return told


def _saved(receipt: Receipt) -> list[str]:
    """Return a line if inputs of norms and activations are kept in codes."""
    formats = [one.saved_activations for one in receipt.gemms if one.saved_activations]
    counts = {name: formats.count(name) for name in formats}
    return [f"saved activations: {name} around {counted(count, 'weight')}" for name, count in counts.items()]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def as_html(receipt: Receipt) -> str:
    """Return a page that needs no other file."""
    cells = [f"<tr>{''.join(f'<th>{html.escape(title)}</th>' for title in _HEAD)}</tr>"]
    for one in receipt.gemms:
        row = "".join(
            f"<td{' class=r' if column in _RIGHT else ''}>{html.escape(cell)}</td>"
            for column, cell in enumerate(_row([one]))
        )
        cells.append(f"<tr class={one.decision}>{row}</tr>")
    totals = "".join(f"<p>{html.escape(line)}</p>" for line in _totals(receipt))
    return (
        "<!doctype html><meta charset=utf-8>"
        f"<title>{html.escape(receipt.model)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:left}.r{text-align:right}"
        ".kept{color:#777}table{border-collapse:collapse}tr{border-bottom:1px solid #ddd}</style>"
        f"<h1>{html.escape(receipt.model)}</h1>{totals}{_picture(receipt)}<table>{''.join(cells)}</table>\n"
    )


def _picture(receipt: Receipt) -> str:
    """Return a bar of the FLOPs per token: one part per weight, as wide as its share, in the color of its decision."""
    width, height, left, parts = 640.0, 48, 0.0, []
    margin, line, letter = 16, 24, 9.0  # a letter's width at the font's size
    shares: dict[str, float] = {}
    narrow: dict[str, list[str]] = {}  # names that do not fit their part
    for one in receipt.gemms:
        share = one.flops_share * width
        shares[one.decision] = shares.get(one.decision, 0.0) + one.flops_share
        percent = f"{one.flops_share:.1%}"
        title = html.escape(f"{one.name}: {percent}, {one.decision}")
        parts.append(
            f'<rect x="{left:.2f}" y="0" width="{share:.2f}" height="{height}" fill="{_COLORS[one.decision]}" '
            f'stroke="#ffffff" stroke-width="0.5"><title>{title}</title></rect>'
        )
        room = (share - 6) / letter  # characters between the edges
        name = one.name.rpartition(".")[2] if len(one.name) > room else one.name
        if len(name) > room:
            narrow.setdefault(one.decision, []).append(one.name)
        for told, y in ((name, 20), (percent, 40)):
            if len(told) <= room:
                inside = f'x="{left + share / 2:.2f}" y="{y}" text-anchor="middle"'
                ink = "black" if one.decision == "kept" else "white"
                parts.append(f'<text {inside} fill="{ink}">{html.escape(told)}</text>')
        left += share
    x = 0.0
    for decision in (decision for decision in _COLORS if decision in shares):
        told, (unnamed, *more) = f"{decision} {shares[decision]:.1%}", narrow.get(decision) or [""]
        if unnamed and not more and len(unnamed) <= 24:
            told += f": layer {html.escape(unnamed)}"
        parts.append(f'<rect x="{x}" y="{height + 12}" width="15" height="15" fill="{_COLORS[decision]}"/>')
        parts.append(f'<text x="{x + 22}" y="{height + 25}" fill="#333333">{told}</text>')
        x += 50 + letter * len(told)
    run = "would run" if receipt.dry_run else "run"
    finding = f"{receipt.flops_covered:.1%} of the FLOPs per token {run} under a recipe"
    below = (
        "width: share of the FLOPs per token; rounded, so parts may not add up",
        "FLOPs: additions and multiplications in GEMMs, the layers' matrix products",
        "converted: computes in its recipe's format; kept: as before",
    )
    parts.append(f'<text x="0" y="-14" font-size="18" font-weight="bold" fill="#333333">{finding}</text>')
    for place, told in enumerate(below):
        parts.append(f'<text x="0" y="{height + 25 + line * (place + 1)}" fill="#333333">{told}</text>')
    wide, top = width + 2 * margin, 30 + margin
    high = top + height + 25 + line * len(below) + margin
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-margin} {-top} {wide:.0f} {high}" width="{wide:.0f}" '
        f'font-family="sans-serif" font-size="16" role="img" aria-label="FLOPs per token by weight">'
        f"{''.join(parts)}</svg>"
    )
