"""A comparison of runs as rows, and the rows as a terminal table, as JSON and as Markdown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.table import Table
from rich.text import Text

from narrowcast._checks import counted

from ..tables import make_table
from .history import RunResult
from .progress import format_duration
from .recipes import CHOICES

BASELINE = "bf16"
LIMIT = 1.0  # percent: a larger gap to one seed of bf16 is no longer equal
SHORTEST_JUDGED = 240  # steps; before, losses fall so fast that a gap says little about a recipe


@dataclass(frozen=True)
class Row:
    """One recipe next to the baseline: the means of its runs, which differ in their seed.

    Args:
        recipe: canonical recipe name.
        title: name for people.
        held_out_loss: last held-out loss, nats per byte.
        gap_percent: how far above the baseline's last held-out loss it lies; negative if below.
        tolerance_percent: largest gap that counts as equal quality: `LIMIT`, or that of the baseline's highest seed to
            the mean of its seeds if it is larger; None for the baseline.
        tokens_per_second: training speed.
        seconds: wall time of a run.
        held_out: pairs of step and held-out loss.
        seeds: of the runs.
        spread: lowest and highest last held-out loss.
        losses: per step of `held_out` lowest and highest.
        gaps: pairs of step and gap in percent.
        seed_gaps: the last gap of each seed that the baseline has, too, in percent; of all seeds if it has none.
    """

    recipe: str
    title: str
    held_out_loss: float
    gap_percent: float
    tolerance_percent: float | None
    tokens_per_second: float
    seconds: float
    held_out: list[tuple[int, float]]
    seeds: list[int]
    spread: tuple[float, float]
    losses: list[tuple[float, float]]
    gaps: list[tuple[int, float]]
    seed_gaps: list[float]

    @property
    def within(self) -> bool:
        """Whether the gap is within the tolerance."""
        return self.tolerance_percent is None or self.gap_percent <= self.tolerance_percent


def compare(results: Sequence[RunResult]) -> list[Row]:
    """Set runs side by side, those of one recipe as one row.

    A gap compares runs of one seed, which saw the same batches from the same weights; where the baseline has none of a
    recipe's seeds, the means.

    Args:
        results: runs on the same text and schedule, those of a recipe together; the baseline among them.

    Raises:
        ValueError: the baseline is missing among several recipes.
    """
    groups: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        groups.setdefault((result.recipe, result.variant), []).append(result)
    if (BASELINE, "") not in groups and len(groups) > 1:
        raise ValueError(f"no {BASELINE} run to compare with among {[r.recipe for r in results]}")
    baseline = groups.get((BASELINE, ""), next(iter(groups.values())))
    return [_row(runs, baseline) for runs in groups.values()]


def alone(result: RunResult) -> Row:
    """Return a run as a row that has no other beside it."""
    return _row(runs := [result], runs)


def _row(runs: list[RunResult], baseline: list[RunResult]) -> Row:
    first = runs[0]
    plain = [run.held_out_loss for run in baseline]
    limit = max(LIMIT, 100 * (max(plain) / fmean(plain) - 1))
    ends = [run.held_out_loss for run in runs]
    curves = [dict(run.history.held_out) for run in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    at = {step: [curve[step] for curve in curves] for step in steps}
    gaps = [(step, percents) for step in steps if (percents := _gaps(runs, baseline, step))]
    return Row(
        recipe=first.recipe,
        title=CHOICES[first.recipe].title + (f" ({first.variant})" if first.variant else ""),
        held_out_loss=fmean(ends),
        gap_percent=fmean(gaps[-1][1]),
        tolerance_percent=None if runs is baseline else limit,
        tokens_per_second=fmean(run.pace.tokens_per_second for run in runs),
        seconds=fmean(run.seconds for run in runs),
        held_out=[(step, fmean(losses)) for step, losses in at.items()],
        seeds=[run.seed for run in runs],
        spread=(min(ends), max(ends)),
        losses=[(min(losses), max(losses)) for losses in at.values()],
        gaps=[(step, fmean(percents)) for step, percents in gaps],
        seed_gaps=gaps[-1][1],
    )


def _gaps(runs: list[RunResult], baseline: list[RunResult], step: int) -> list[float]:
    """Return the gap in percent of each seed that the baseline has, too; of all seeds to its mean if it has none."""
    curves = {run.seed: dict(run.history.held_out) for run in runs}
    theirs = {run.seed: dict(run.history.held_out) for run in baseline}
    plain = {seed: curve[step] for seed, curve in theirs.items() if step in curve}
    if not plain:
        return []
    if not curves.keys() & theirs.keys():
        plain = dict.fromkeys(curves, fmean(plain.values()))
    return [100 * (curve[step] / plain[seed] - 1) for seed, curve in curves.items() if seed in plain]


def rows_to_json(rows: Sequence[Row]) -> list[dict]:
    """Return the rows as JSON-able dictionaries, the verdict included."""
    return [{**asdict(row), "within": row.within} for row in rows]


def too_few(steps: int) -> str:
    """Return such as "4 steps are too few", for the begin of a sentence; "" of enough."""
    return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} too few" * (steps < SHORTEST_JUDGED)


def judged(rows: Sequence[Row]) -> bool:
    """Return whether the runs are long enough to compare their gaps with what is allowed."""
    return not too_few(rows[0].held_out[-1][0])


def columns(rows: Sequence[Row], *, timed: bool) -> dict[str, list[str]]:
    """Return the texts of a table by heading.

    Args:
        timed: whether the runs' speed is a recipe's own: a CPU emulates the formats.
    """
    columns = {
        "recipe": [row.title for row in rows],
        "held-out loss": [_loss(row) for row in rows],
    }
    if len(rows) > 1:
        columns["gap to bf16"] = [_gap(row) for row in rows]
    if len(rows) > 1 and judged(rows):
        columns["allowed"] = [_allowed(row) for row in rows]
    if timed:
        columns["tokens/s"] = [f"{row.tokens_per_second:,.0f}" for row in rows]
        columns["time"] = [format_duration(row.seconds) for row in rows]
    return columns


def _loss(row: Row) -> str:
    loss = f"{row.held_out_loss:.4f}"
    return f"{loss} ({row.spread[0]:.4f} to {row.spread[1]:.4f})" if len(row.seeds) > 1 else loss


def _gap(row: Row) -> str:
    return "-" if row.tolerance_percent is None else f"{row.gap_percent:+.2f}%"


def _allowed(row: Row) -> str:
    if row.tolerance_percent is None:
        return "-"
    verdict = "met" if row.within else "missed"
    return f"{row.tolerance_percent:.3g}%, {verdict}"


def remarks(rows: Sequence[Row], *, timed: bool) -> list[str]:
    """Return what a table leaves out and why, a sentence each."""
    said = []
    if len(rows) == 1:
        said.append("One recipe, nothing to compare; train another with --recipe.")
    elif few := too_few(rows[0].held_out[-1][0]):
        said.append(f"{few} to rank recipes: losses differ by chance; take {SHORTEST_JUDGED} or more.")
    if not timed and len(rows) > 1:
        said.append("A CPU emulates low precision: it rounds values as a GPU does, and is slower.")
    return said


def terminal_table(
    rows: Sequence[Row], unit: str = "byte", *, timed: bool = True, diverged: Sequence[dict] = ()
) -> Table:
    """Return the rows as a table for rich.

    Args:
        unit: that a loss is per.
        timed: as `columns` takes it.
        diverged: runs that have no loss: recipe, seed and step of each.
    """
    counts = {len(row.seeds) for row in rows}
    many = f"{'' if len(counts) == 1 else 'up to '}{max(counts)} seeds"
    title = f"held-out loss in nats per {unit}" + (
        f", mean of {many}, lowest to highest" if max(counts) > 1 else ""
    )
    texts = {**columns(rows, timed=timed), "recipe": [_both_names(row.recipe, row.title) for row in rows]}
    table = make_table([*texts], title, left=("allowed",))
    for row, line in zip(rows, zip(*texts.values())):
        color = "green" if row.within else "red"
        colored = row.tolerance_percent is not None and judged(rows)
        table.add_row(*(Text(text, color if colored and text == _gap(row) else "") for text in line))
    for run in diverged:
        title = f"{CHOICES[run['recipe']].title}, seed {run['seed']}"
        table.add_row(_both_names(run["recipe"], title), Text(f"diverged at step {run['step']}", "red"))
    return table


def _both_names(recipe: str, told: str) -> str:
    """Return a title, with the word of `--recipe` behind it unless both are the same."""
    title = CHOICES[recipe].title
    return told if title == recipe else told.replace(title, f"{title} ({recipe})", 1)


def markdown_table(rows: Sequence[Row], *, timed: bool = True) -> str:
    """Return the rows as a Markdown table; `timed` as `columns` takes it."""
    texts = columns(rows, timed=timed)
    rules = ("---" if heading in ("recipe", "allowed") else "---:" for heading in texts)
    return "\n".join("| " + " | ".join(line) + " |" for line in (texts, rules, *zip(*texts.values())))
