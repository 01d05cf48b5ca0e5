"""Finished runs, read from their folders and set side by side: a table, a picture, CSV files."""

import csv
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .atomic import write_bytes, write_json
from .checkpoint import saved_meta
from .config import TrainConfig, compared_fields, settings_of
from .errors import SettingsError
from .folder import CHECKPOINTS, COMPARED, LOSSES, diverged_runs, finished_runs, interrupted_runs, run_of
from .history import History, RunResult
from .machine import one_line
from .pace import Pace
from .picture import caption, draw
from .recipes import CHOICES
from .report import BASELINE, Row, baseline_of, compare, rows_to_json

# Options in which compared runs may differ; the result lists them.
FREE = {
    "recipe",
    "seed",
    "recipe_table",
    "head_recipe",
    "keep_bf16",
    "emulate",
    "compile",
    "graphs",
    "by_block",
    "recompute",
    "save_every",
}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Args:
        rows: one per recipe, over its seeds.
        results: the runs.
        shared: what one run's `result.json` says, of which the settings outside `FREE` hold for all; `machine`
            names the machines of all.
        timed: whether all ran on GPUs; a CPU emulates the formats, and its speed is not a recipe's own.
        best: folder of the run with the lowest last held-out loss.
        notes: on runs that were interrupted, a sentence each.
        diverged: recipe, seed and step of the runs that diverged.
    """

    rows: list[Row]
    results: list[RunResult]
    shared: dict
    timed: bool
    best: Path
    notes: list[str]
    diverged: list[dict]

    @property
    def unit(self) -> str:
        """The name of a token."""
        return self.shared["data"].get("unit", "byte")


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read runs and compare them: at their end, or at the last evaluation of the one that was interrupted first.

    Args:
        folders: of runs, or folders that hold some, at any depth; interrupted ones by their own folder only.

    Raises:
        SettingsError: there is no run, or of several recipes none in bf16; one appears twice, or they differ in more
            than `FREE`.
    """
    paths, notes = finished_runs(folders), []
    contents = [_read(path) for path in paths]
    ends: list[int] = []
    taken: list[str] = []
    for run in interrupted_runs(folders):
        meta = saved_meta(run / CHECKPOINTS)
        history = History.from_json(meta.get("history", {"train": [], "held_out": []}))
        steps, end = len(history.train), history.held_out[-1][0] if history.held_out else 0
        where = f"at step {steps} of {meta['settings']['steps']}" if steps else "before its first checkpoint"
        told = f"{run} was interrupted {where}"
        if not end:
            notes.append(f"{told}; continue it with --resume")
        elif run not in map(run_of, folders):
            notes.append(f"{told}; give its own folder to compare up to there")
        else:
            paths.append(run)
            contents.append(_completed({"tokens_per_second": 0.0, "seconds": 0.0, **meta}, run))
            ends.append(end)
            taken.append(told)
    notes += [f"{told}; all are compared at step {min(ends)}" for told in taken]
    if not paths:
        raise SettingsError(f"no finished run{f': {notes[0]}' if notes else ''}")
    for path, content in zip(paths, contents):
        _require_comparable(paths[0], contents[0], path, content)
    results = [_up_to(min(ends), _result(content)) if ends else _result(content) for content in contents]
    best, _ = min(zip(paths, results), key=lambda run: run[1].held_out_loss)
    seen: dict[tuple[str, str, int], Path] = {}
    for path, result in zip(paths, results):
        key = (result.recipe, result.variant, result.seed)
        if key in seen:
            raise SettingsError(f"{seen[key]} and {path} are the same recipe and seed; leave one of them out")
        seen[key] = path
    kinds = {(result.recipe, result.variant) for result in results}
    if (BASELINE, "") not in kinds and len(kinds) > 1:
        raise SettingsError(
            f"no {BASELINE} run among them to compare with; train one with --recipe {BASELINE}, without "
            "--head-recipe and --recipe-table"
        )
    order = list(CHOICES)
    results.sort(key=lambda result: (order.index(result.recipe), result.variant, result.seed))
    machines = sorted({one_line(content["machine"]) for content in contents})
    shared = {**contents[0], "machine": "; ".join(machines)}
    timed = all("gpu" in content["machine"] for content in contents)
    diverged = [json.loads(path.read_text()) for path in diverged_runs(folders)]
    return Comparison(compare(results), results, shared, timed, run_of(best), notes, diverged)


def write_comparison(comparison: Comparison, folder: Path, *, command: str) -> None:
    """Write into a folder `loss.png`, `summary.csv`, `losses.csv` and `results.json`."""
    shared = comparison.shared
    settings = {name: value for name, value in shared["settings"].items() if name not in FREE}
    text = f"{comparison.unit}s of {shared['data']['source']}"
    told = caption(comparison.rows, parameters=shared["parameters"], text=text, timed=comparison.timed)
    train = comparison.results[0].history.train if len(comparison.results) == 1 else []
    write_bytes(folder / LOSSES, draw(comparison.rows, subtitle=told, unit=comparison.unit, train=train))
    write_bytes(folder / "losses.csv", _losses(comparison.results))
    write_bytes(folder / "summary.csv", _summary(comparison))
    content = {
        "command": command,
        "machine": shared["machine"],
        "data": shared["data"],
        "parameters": shared["parameters"],
        "settings": settings,
        "recipes": rows_to_json(comparison.rows),
        "diverged": comparison.diverged,
    }
    write_json(folder / COMPARED, content)


def _losses(results: Sequence[RunResult]) -> bytes:
    lines = [
        (result.recipe, result.variant, result.seed, step, f"{loss:.6f}")
        for result in results
        for step, loss in result.history.held_out
    ]
    return _csv(("recipe", "layers apart", "seed", "step", "held-out loss"), lines)


def _summary(comparison: Comparison) -> bytes:
    head = ("recipe", "layers apart", "seed", "mode", "steps", "held-out loss")
    head += ("gap to bf16, %", "tokens/s", "MFU of bf16 peak", "GiB", "seconds")
    lines = []
    plain = baseline_of(comparison.rows).seeds
    gaps = [gap for row in comparison.rows for gap in _gaps_of_seeds(row, plain)]
    for result, gap in zip(comparison.results, gaps):
        pace, mfu = result.pace, result.pace.mfu
        speed = f"{pace.tokens_per_second:.0f}", "" if mfu is None else f"{mfu:.4f}"
        cost = f"{pace.memory / 2**30:.2f}", f"{result.seconds:.0f}"
        loss = f"{result.held_out_loss:.6f}"
        run = result.recipe, result.variant, result.seed, result.mode, result.steps
        lines.append((*run, loss, gap, *speed, *cost))
    return _csv(head, lines)


def _gaps_of_seeds(row: Row, plain: Sequence[int]) -> list[str]:
    """Return the gap of each seed; "" of one that the seeds of bf16, ``plain``, lack while they have others."""
    seeds = [seed for seed in row.seeds if seed in plain] or row.seeds
    gaps = dict(zip(seeds, row.seed_gaps))
    return [f"{gaps[seed]:.3f}" if seed in gaps else "" for seed in row.seeds]


def _csv(head: Sequence[str], lines: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *lines])
    return text.getvalue().encode()


def _read(path: Path) -> dict:
    try:
        return _completed(json.loads(path.read_text()), path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror}); leave its folder out") from error
    except ValueError as error:
        raise SettingsError(_damaged(path, "it is cut short or no JSON")) from error


def _damaged(path: Path, why: str) -> str:
    return f"{path} is damaged: {why}; leave its folder out, or train the run again"


def _completed(content: dict, path: Path) -> dict:
    """Return what a run says with the settings that it lacks, which had a new run's default."""
    try:
        content["settings"] = {**dict(compared_fields(TrainConfig())), **content["settings"]}
        one_line(content["machine"])
        _result(content)
        return content
    except KeyError as error:
        raise SettingsError(_damaged(path, f"it lacks {error.args[0]}")) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingsError(_damaged(path, "a value is not what narrowcast train writes")) from error


def _result(content: dict) -> RunResult:
    settings = content["settings"]
    pace = Pace(content["tokens_per_second"], content.get("mfu"), content.get("peak_memory", 0))
    plain = settings["recipe"] == BASELINE and not settings["recipe_table"]  # nothing to keep in bf16
    apart = [f"bf16: {settings['keep_bf16']}"] if settings["keep_bf16"] and not plain else []
    if settings["head_recipe"] != BASELINE:
        apart.append(f"head: {CHOICES[settings['head_recipe']].title}")
    if table := settings["recipe_table"]:
        apart.append(f"table {hashlib.sha256(table.encode()).hexdigest()[:6]}")
    return RunResult(
        recipe=settings["recipe"],
        history=History.from_json(content["history"]),
        steps=settings["steps"],
        parameters=content["parameters"],
        pace=pace,
        seconds=content["seconds"],
        seed=settings["seed"],
        variant=", ".join(apart),
        mode="graphs" if settings["graphs"] else "compiled" if settings["compile"] else "eager",
    )


def _up_to(step: int, result: RunResult) -> RunResult:
    """Return a run as it was at a step of its evaluations."""
    held_out = [pair for pair in result.history.held_out if pair[0] <= step]
    return replace(result, history=History(result.history.train[:step], held_out), steps=step)


def _require_comparable(first: Path, one: dict, path: Path, other: dict) -> None:
    ours, theirs = one["settings"], other["settings"]
    names = [name for name in ours if name not in FREE and ours[name] != theirs.get(name)]
    if names:
        told = [settings_of((name, each.get(name)) for name in names) for each in (ours, theirs)]
        raise SettingsError(
            f"{first} was trained with {told[0]} and {path} with {told[1]}; compare runs of the same settings"
        )
    if one["data"]["digest"] != other["data"]["digest"]:
        raise SettingsError(
            f"{first} and {path} were trained on different texts; compare runs of the same --data"
        )
