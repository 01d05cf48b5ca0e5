"""A comparison of runs as rows, and the rows as a terminal table, as JSON and as Markdown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from .history import RunResult
from .progress import format_duration
from .recipes import CHOICES

BASELINE = "bf16"


@dataclass(frozen=True)
class Row:
    """One recipe next to the baseline.

    Args:
        recipe: canonical recipe name.
        title: name for people.
        held_out_loss: last held-out loss, nats per byte.
        gap_percent: how far above the baseline's last held-out loss it lies; negative if below.
        tolerance_percent: largest gap that counts as equal quality; None for the baseline.
        tokens_per_second: training speed.
        seconds: wall time of the run.
        held_out: pairs of step and held-out loss.
    """

    recipe: str
    title: str
    held_out_loss: float
    gap_percent: float
    tolerance_percent: float | None
    tokens_per_second: float
    seconds: float
    held_out: list[tuple[int, float]]

    @property
    def within(self) -> bool:
        """Whether the gap is within the tolerance."""
        return self.tolerance_percent is None or self.gap_percent <= self.tolerance_percent


def compare(results: Sequence[RunResult]) -> list[Row]:
    """Set runs side by side.

    Args:
        results: runs on the same text, seed and schedule; the baseline among them.

    Raises:
        ValueError: the baseline is missing.
    """
    baseline = next((r.held_out_loss for r in results if r.recipe == BASELINE), None)
    if baseline is None:
        raise ValueError(f"no {BASELINE} run to compare with among {[r.recipe for r in results]}")
    return [
        Row(
            recipe=result.recipe,
            title=CHOICES[result.recipe].title,
            held_out_loss=result.held_out_loss,
            gap_percent=100 * (result.held_out_loss / baseline - 1),
            tolerance_percent=CHOICES[result.recipe].tolerance,
            tokens_per_second=result.pace.tokens_per_second,
            seconds=result.seconds,
            held_out=result.history.held_out,
        )
        for result in results
    ]


def rows_to_json(rows: Sequence[Row]) -> list[dict]:
    """Return the rows as JSON-able dictionaries, the verdict included."""
    return [{**asdict(row), "within": row.within} for row in rows]


def cells(row: Row) -> list[str]:
    """Return a row's texts: recipe, loss, gap, allowed gap, speed, time."""
    if row.tolerance_percent is None:
        gap, allowed = "-", "-"
    else:
        gap = f"{row.gap_percent:+.2f}%"
        allowed = f"{row.tolerance_percent:g}%, {'met' if row.within else 'missed'}"
    speed = f"{row.tokens_per_second:,.0f}"
    return [row.title, f"{row.held_out_loss:.4f}", gap, allowed, speed, format_duration(row.seconds)]


HEADINGS = ["recipe", "held-out loss", "gap to bf16", "allowed", "tokens/s", "time"]


def terminal_table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for rich."""
    table = Table(title="held-out loss in nats per byte", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("recipe", "allowed") else "right")
    for row in rows:
        color = None if row.tolerance_percent is None else "green" if row.within else "red"
        texts = cells(row)
        texts[2] = f"[{color}]{texts[2]}[/]" if color else texts[2]
        table.add_row(*texts)
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- | ---: | ---: | --- | ---: | ---: |"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)
