"""Draws ``docs/assets/attention-masks-*.svg``: which keys a query sees, as the library's own masks say.

python docs/attention_masks.py
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

import torch

from narrowcast.attention.masks import distances, geometry, hidden_pairs, mask_rule, packed, padded_rows, rows
from narrowcast_tools.schemes import FONTS, INK, write

ASSETS = Path(__file__).resolve().parent / "assets"
CELL, LEFT, ROW = 14, 20, 116  # of a panel: its squares, its left edge, its height
WIDTH, TEXT = 322, 146  # a column of panels; where the words of a panel begin
WRITTEN = {2: "attention-masks", 1: "attention-masks-phone"}  # by columns of panels
TITLE = "causal aligns the first query and key, causal_bottom_right the last"
KEY = "Row: a query. Column: a key. Filled: it sees the key. White dot: the query's own key."
LENGTHS = (6, 8)  # queries and keys
PANELS = (
    ("causal", {}, ("keys up to its own,", "counted from the first")),
    ("causal_bottom_right", {}, ("keys up to its own,", "counted from the last")),
    ("no_mask", {"window_size": (2, 1)}, ("2 keys back, 1 ahead,", "counted from the last")),
    ("padding", {}, ("4 of 6 queries and", "6 of 8 keys are real")),
    ("padding_causal_bottom_right", {}, ("both, counted from the", "last real key")),
    (
        "thd, padding_causal",
        {"attn_mask_type": "padding_causal"},
        ("packed sequences of", "3, 2 and 1 tokens"),
    ),
)


def seen(title: str, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Bools (queries, keys) of a panel: what a query sees, and its own key, from which windows count.

    Padded panels have 4 queries and 6 keys, packed ones sequences of 3, 2 and 1.
    """
    rule = mask_rule(**{"attn_mask_type": title, **options})
    if title.startswith("thd"):
        cu_seqlens = torch.tensor([0, 3, 5, 6])
        places = geometry(packed(6, cu_seqlens, None), packed(6, cu_seqlens, None), rule, 6, 6)
    elif rule.padding:
        sides = [padded_rows(n, None, torch.tensor([0, n - 2])) for n in LENGTHS]
        places = geometry(sides[0], sides[1], rule, *LENGTHS)
    else:
        sides = [rows(n, torch.device("cpu")) for n in LENGTHS]
        places = geometry(sides[0], sides[1], rule, *LENGTHS)
    hidden = hidden_pairs(places, rule, None)
    assert hidden is not None
    shown = ~hidden[0, 0]
    own = distances(places)[0] == 0
    return shown, own & shown if rule.bounded else torch.zeros_like(shown)


def wrapped(title: str) -> list[str]:
    """The lines of a mask's name: a long one breaks before its direction."""
    if len(title) < 22:
        return [title]
    return title.replace("_bottom", " _bottom").split()


def draw(columns: int) -> str:
    """The picture for light pages: one square per pair, a row per query, a column per key; panels in columns."""
    parts, head = [], 0
    for text, size, letters in ((TITLE, 15, 40), (KEY, 11, 56)):
        style = ' font-size="15" font-weight="700"' if size == 15 else ""
        for line in wrap(text, columns * letters):
            head += size + 4
            parts.append(f'<text x="0" y="{head}"{style}>{line}</text>')
    head += 22
    for index, (title, options, told) in enumerate(PANELS):
        x0 = WIDTH * (index % columns)
        left, text_left, top = x0 + LEFT, x0 + TEXT, head + index // columns * ROW
        window = options.get("window_size")
        name = [f"{title},", f"window_size={window}"] if window else wrapped(title)
        for line, text in enumerate((*name, *told)):
            weight = ' font-weight="700"' if line < len(name) else ""
            parts.append(f'<text x="{text_left}" y="{top + 12 + 16 * line}"{weight}>{text}</text>')
        shown, own = seen(title, options)
        middle = top + len(shown) * CELL / 2
        parts.append(f'<text x="{left}" y="{top + len(shown) * CELL + 11}">keys →</text>')
        turned = f'transform="rotate(-90 {left - 6} {middle})" text-anchor="middle"'
        parts.append(f'<text x="{left - 6}" y="{middle}" {turned}>← queries</text>')
        for i, row in enumerate(shown.tolist()):
            for j, visible in enumerate(row):
                x, y = left + j * CELL, top + i * CELL
                look = 'fill="#0f9488"' if visible else 'fill="none" stroke="#b8b8b8"'
                parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{CELL - 3}" {look}/>')
                if own[i, j]:
                    middle = (CELL - 3) / 2
                    parts.append(f'<circle cx="{x + middle}" cy="{y + middle}" r="2.5" fill="white"/>')
    width, height = columns * WIDTH + 8, head + -(-len(PANELS) // columns) * ROW - 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 0 {width} {height}" width="{width * 1.2:g}" '
        f'font-family="{FONTS}" fill="{INK["light"]}" font-size="11" role="img" '
        f'aria-label="{TITLE}">'
    )
    return "\n".join((head, *parts, "</svg>\n"))


if __name__ == "__main__":
    for columns, name in WRITTEN.items():
        write(draw(columns), ASSETS, name)
