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
SHORTEST_JUDGED = 240  # steps; before, losses fall so fast that a gap says little about a recipe
PLACE = "bf16's seeds"  # heading of their range, and of where gaps are beside it


@dataclass(frozen=True)
class Row:
    """One recipe next to the baseline: the means of its runs, which differ in their seed.

    Args:
        recipe: canonical recipe name.
        title: name for people.
        held_out_loss: last held-out loss, nats per byte.
        gap_percent: how far above the baseline's last held-out loss it lies; negative if below.
        seed_range: how far the lowest and the highest seed of the baseline end from their mean, in percent; None if
            the baseline has one seed.
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
    seed_range: tuple[float, float] | None
    tokens_per_second: float
    seconds: float
    held_out: list[tuple[int, float]]
    seeds: list[int]
    spread: tuple[float, float]
    losses: list[tuple[float, float]]
    gaps: list[tuple[int, float]]
    seed_gaps: list[float]

    @property
    def place(self) -> str:
        """Where the gap is beside the range of the baseline's seeds: "below", "within", "above"; "" without a range."""
        if self.seed_range is None:
            return ""
        low, high = self.seed_range
        return "below" if self.gap_percent < low else "above" if self.gap_percent > high else "within"


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
    low, high = (percent_above(loss, fmean(plain)) for loss in (min(plain), max(plain)))
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
        seed_range=(low, high) if len(plain) > 1 else None,
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
    return [percent_above(curve[step], plain[seed]) for seed, curve in curves.items() if seed in plain]


def percent_above(loss: float, base: float) -> float:
    """Return how far a loss is above another one, in percent."""
    return 100 * (loss / base - 1)


def baseline_of(rows: Sequence[Row]) -> Row:
    """Return the row that the others are compared with."""
    return next((row for row in rows if row.recipe == BASELINE), rows[0])


def rows_to_json(rows: Sequence[Row]) -> list[dict]:
    """Return the rows as JSON-able dictionaries, with their places if the rows can be judged."""
    return [{**asdict(row), "place": "" if why_unjudged(rows) else row.place} for row in rows]


def too_few(steps: int) -> str:
    """Return such as "4 steps are too few", for the begin of a sentence; "" of enough."""
    return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} too few" * (steps < SHORTEST_JUDGED)


def why_unjudged(rows: Sequence[Row]) -> str:
    """Return why gaps say nothing about the recipes, as a sentence; "" if they do."""
    if few := too_few(rows[0].held_out[-1][0]):
        return f"{few} to rank recipes: losses differ by chance; take {SHORTEST_JUDGED} or more."
    if rows[0].seed_range is None:
        return "One seed of bf16 ranks no recipe: another seed moves losses, too; --seeds 3 shows how far."
    return ""


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
        columns["gap to bf16"] = ["-" if row is baseline_of(rows) else _gap(row) for row in rows]
    if len(rows) > 1 and not why_unjudged(rows):
        columns[PLACE] = [_range(row) if row is baseline_of(rows) else row.place for row in rows]
    if timed:
        columns["tokens/s"] = [f"{row.tokens_per_second:,.0f}" for row in rows]
        columns["time"] = [format_duration(row.seconds) for row in rows]
    return columns


def _loss(row: Row) -> str:
    loss = f"{row.held_out_loss:.4f}"
    return f"{loss} ({row.spread[0]:.4f} to {row.spread[1]:.4f})" if len(row.seeds) > 1 else loss


def _gap(row: Row) -> str:
    return f"{row.gap_percent:+.2f}%"


def _range(row: Row) -> str:
    return " to ".join(f"{end:+.2f}" for end in row.seed_range or ()) + "%"


def remarks(rows: Sequence[Row], *, timed: bool) -> list[str]:
    """Return what a table leaves out and why, a sentence each."""
    said = []
    if len(rows) == 1:
        said.append("One recipe, nothing to compare; train another with --recipe.")
    elif why := why_unjudged(rows):
        said.append(why)
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
    table = make_table([*texts], title, left=(PLACE,))
    for row, line in zip(rows, zip(*texts.values())):
        color = "red" if row.place == "above" else "green"
        table.add_row(*(Text(text, color if PLACE in texts and text == _gap(row) else "") for text in line))
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
    rules = ("---" if heading in ("recipe", PLACE) else "---:" for heading in texts)
    return "\n".join("| " + " | ".join(line) + " |" for line in (texts, rules, *zip(*texts.values())))
