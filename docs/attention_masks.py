"""Draws ``docs/assets/attention-masks-*.svg``: which keys a query sees, as the library's own masks say.

python docs/attention_masks.py
"""

from __future__ import annotations

from pathlib import Path

import torch

from narrowcast.attention.masks import distances, geometry, hidden_pairs, mask_rule, packed, padded_rows, rows
from narrowcast_tools.schemes import FONTS, INK, write

ASSETS = Path(__file__).resolve().parent / "assets"
CELL, LEFT, APART, NAMES = (
    17,
    30,
    240,
    36,
)  # of a panel: its squares, its left edge, its width, its lines of text
TITLE = (
    "causal counts from the first query and key,",
    "a window of no_mask counts from the last",
)
KEY = (
    "Row: a query. Column: a key. Filled: the query sees the key; empty: it does not.",
    "White dot: the query's own key, from which the mask counts.",
)
HEAD = 96
LENGTHS = (6, 8)  # queries and keys
PANELS = (
    ("causal", {}, "keys up to its own, from the first"),
    ("causal_bottom_right", {}, "keys up to its own, from the last"),
    ("no_mask", {"window_size": (2, 1)}, "2 back, 1 ahead, from the last key"),
    ("padding", {}, "4 of 6 queries, 6 of 8 keys are real"),
    ("padding_causal_bottom_right", {}, "both, from the last real key"),
    ("thd, padding_causal", {"attn_mask_type": "padding_causal"}, "packed sequences of 3, 2, 1 tokens"),
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


def draw() -> str:
    """The picture for light pages: one square per pair, a row per query, a column per key."""
    bold = 'font-size="16" font-weight="700"'
    parts = [f'<text x="10" y="{24 + 20 * line}" {bold}>{text}</text>' for line, text in enumerate(TITLE)]
    for line, key in enumerate(KEY):
        parts.append(f'<text x="10" y="{64 + 16 * line}" font-size="11">{key}</text>')
    rows = LENGTHS[0] * CELL + NAMES + 34
    for index, (title, options, told) in enumerate(PANELS):
        left, top = LEFT + index % 2 * APART, HEAD + NAMES + index // 2 * rows
        window = options.get("window_size")
        name = f"{title}, window_size={window}" if window else title
        parts.append(f'<text x="{left}" y="{top - 23}" font-weight="600">{name}</text>')
        parts.append(f'<text x="{left}" y="{top - 8}" font-size="11">{told}</text>')
        shown, own = seen(title, options)
        middle = top + len(shown) * CELL / 2
        parts.append(f'<text x="{left}" y="{top + len(shown) * CELL + 11}" font-size="11">keys →</text>')
        turned = f'transform="rotate(-90 {left - 6} {middle})" text-anchor="middle"'
        parts.append(f'<text x="{left - 6}" y="{middle}" font-size="11" {turned}>← queries</text>')
        for i, row in enumerate(shown.tolist()):
            for j, visible in enumerate(row):
                x, y = left + j * CELL, top + i * CELL
                look = 'fill="#0f9488"' if visible else 'fill="none" stroke="#b8b8b8"'
                parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{CELL - 3}" {look}/>')
                if own[i, j]:
                    middle = (CELL - 3) / 2
                    parts.append(f'<circle cx="{x + middle}" cy="{y + middle}" r="3" fill="white"/>')
    width, height = LEFT + 2 * APART - 10, HEAD + 3 * rows - 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width * 1.3:g}" '
        f'font-family="{FONTS}" fill="{INK["light"]}" font-size="12" role="img" '
        'aria-label="Visible keys by mask type">'
    )
    return "\n".join((head, *parts, "</svg>\n"))


if __name__ == "__main__":
    write(draw(), ASSETS, "attention-masks")
