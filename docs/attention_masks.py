"""Draws ``docs/assets/attention-masks.svg``: which keys a query sees, as the library's own masks say.

python docs/attention_masks.py
"""

from __future__ import annotations

from pathlib import Path

import torch

from narrowcast.attention.masks import geometry, hidden_pairs, mask_rule, packed, padded_rows, rows

PICTURE = Path(__file__).resolve().parent / "assets" / "attention-masks.svg"
CELL, GAP, TITLE = 13, 34, 52
LENGTHS = (6, 8)  # queries and keys
PANELS = (
    ("causal", {}),
    ("causal_bottom_right", {}),
    ("no_mask", {"window_size": (2, 1)}),
    ("padding", {}),
    ("padding_causal_bottom_right", {}),
    ("thd, padding_causal", {"attn_mask_type": "padding_causal"}),
)


def seen(title: str, options: dict) -> torch.Tensor:
    """(queries, keys) bools of a panel: padded ones have 4 queries and 6 keys, packed ones sequences of 3, 2 and 1."""
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
    return ~hidden[0, 0]


def draw() -> str:
    """The picture: one square per pair, a row per query, a column per key."""
    width = LENGTHS[1] * CELL + GAP * 2 + 20
    key = "rows: queries; columns: keys; green: the query sees the key"
    parts = [f'<text x="{GAP}" y="16" fill="#7d8590">{key}</text>']
    for index, (title, options) in enumerate(PANELS):
        left, top = GAP + index % 3 * width, TITLE + index // 3 * (LENGTHS[0] * CELL + TITLE + GAP)
        names = [title]
        if window := options.get("window_size"):
            names = [f"{title}, window_size={window}:", "{} keys back, {} ahead".format(*window)]
        for line, name in enumerate(reversed(names)):
            parts.append(f'<text x="{left}" y="{top - 8 - 14 * line}" fill="#7d8590">{name}</text>')
        for i, row in enumerate(seen(title, options).tolist()):
            for j, visible in enumerate(row):
                color = "#0f766e" if visible else "#d1d5db"
                place = f'x="{left + j * CELL}" y="{top + i * CELL}" width="{CELL - 2}" height="{CELL - 2}"'
                parts.append(f'<rect {place} fill="{color}"/>')
    height = 2 * (LENGTHS[0] * CELL + TITLE + GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * width + GAP} {height}" font-family="sans-serif" '
        'font-size="11" role="img" aria-label="Visible keys by mask type">'
    )
    return "\n".join((head, *parts, "</svg>\n"))


if __name__ == "__main__":
    PICTURE.write_text(draw())
