"""The work of `narrowcast bench`; `cli.commands` has its options."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

import torch
import typer
from rich.console import Console

from narrowcast._version import __version__

from ..interrupt import Interrupted
from ..words import AUTO, follow_up, follow_up_again
from .account import measure_ceilings, take_account
from .account_show import account_table, draw_account, write_account
from .asked import ACCOUNT_MODEL, ACCOUNT_MODELS, bench_settings, works
from .measure import Result, contenders
from .show import picture, read_csv, spread, table, write_csv
from .worker import Chosen, Worker


def bench(
    context: typer.Context,
    suite: str,
    *,
    model: str | None,
    only: str,
    in_parts: bool,
    optimizer: str,
    head_recipe: str,
    device: str,
    out: Path | None,
    seconds: int,
    minutes: float,
    resume: bool,
    **_: str,
) -> int:
    """Run `narrowcast bench`; return its exit code."""
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        use = "run it on a GPU, or bench tiny here" if suite == "account" else "use --device cpu"
        raise typer.BadParameter(f"--device is cuda, and torch finds no CUDA device; {use}")
    recipes, modes = bench_settings({**context.params, "device": device})
    suite = suite or ("tiny" if device == "cpu" else "all")
    if suite == "account":
        return _account(
            model or ACCOUNT_MODEL, (recipes, ["compiled"], False, optimizer, head_recipe), out, in_parts
        )
    words = recipes, modes, device == "cpu", optimizer, head_recipe
    chosen, running = works(suite, only), list(contenders(*words))
    machine = _machine(device)
    title = _title(suite, machine)
    known = read_csv(out / "bench.csv", machine) if resume and out is not None else {}
    results: list[Result] = []
    stopped = False
    total = len(chosen) * len(running)

    def draw(folder: Path) -> None:
        image = picture(results, title, emulated=device == "cpu", total=total)
        (folder / "bench.png").write_bytes(image)

    console, start = Console(), time.monotonic()
    console.print(_announced(suite, total, device, seconds), highlight=False)
    try:
        with Worker(words, device, seconds) as worker:
            for work in chosen:
                baseline: float | None = None
                console.print(work.name, highlight=False, markup=False)
                for index, contender in enumerate(running):
                    named = work.name, contender.name, contender.mode
                    result = known.get(named)
                    if result is None and minutes and time.monotonic() - start > 60 * minutes:
                        result = Result(*named, None, None, None, f"not started within {minutes:g} min")
                    elif result is None:
                        with console.status(", ".join(named)):
                            result = worker.run(work, contender, index)
                    baseline = baseline if index else result.ms  # bf16 is the first
                    share = None if baseline is None or result.ms is None else result.ms / baseline
                    results.append(result._replace(share=share))
                    done = _so_far(results, known, total, time.monotonic() - start)
                    line, told = f"  [{done}] {contender.name}, {contender.mode}:", _told(result)
                    between = " " if len(f"{line} {told}") <= console.width else "\n    "
                    console.print(f"{line}{between}{told}", highlight=False, markup=False)
                    if out is not None:  # after each, so that an interrupted run leaves what it has
                        out.mkdir(parents=True, exist_ok=True)
                        write_csv(results, out / "bench.csv", machine)
                if out is not None:
                    draw(out)
    except KeyboardInterrupt:
        stopped = True
        if out is not None and results:
            draw(out)
    if results:
        console.print(table(results, title))
    written = [path for path in (out / "bench.csv", out / "bench.png") if path.exists()] if out else []
    if written:
        console.print(f"wrote {' and '.join(map(str, written))}", highlight=False)
    if stopped:
        where = f"interrupted after {len(results)} of {total} measurements"
        raise Interrupted(where, resumable=bool(written))
    if device == "cpu":
        console.print("A CPU emulates the formats: for speed, run bench on a GPU.", highlight=False)
    if not written:
        typer.echo(follow_up_again(context.obj, "--out", "bench", "keeps the results and draws a picture"))
    elif device == "cpu":
        typer.echo(follow_up("train", "--recipe", f"bf16,{recipes[0]}"))
    else:
        typer.echo(follow_up("bench", "account"))
    return 0


def _so_far(results: list[Result], known: Collection[object], total: int, seconds: float) -> str:
    """Return how much is done, and how long the rest takes if it takes as long as what was measured."""
    measured = sum((one.work, one.contender, one.mode) not in known for one in results)
    left = f", {seconds / measured * (total - len(results)):.0f} s left" if measured else ""
    return f"{len(results)}/{total}, {seconds:.0f} s{left}"


def _announced(suite: str, cases: int, device: str, seconds: int) -> str:
    """Return how much there is to do, before it begins."""
    limit = f", at most {seconds} s each" if seconds else ""
    told = f"bench {suite}: {cases} measurements{limit}"
    if device == "cuda":
        return f"{told}, with compilation"
    if suite == "tiny":
        return f"{told}; about 10 s each if compiled, most of that for compilation"
    return f"{told}; a CPU emulates these sizes in minutes each: use bench tiny, or choose with --only"


def _account(model: str, chosen: Chosen, out: Path | None, in_parts: bool) -> int:
    """Print the account of a model's step in bf16 and with each recipe; write account.csv and account.png."""
    running = [*itertools.islice(contenders(*chosen), 1 + len(chosen[0]))]  # not other packages
    machine, console = _machine("cuda"), Console()
    recipes, _, _, optimizer, head = chosen
    asked = (
        f"account --model {model} --recipe {','.join(recipes)} --optimizer {optimizer} --head-recipe {head}"
    )
    caption = _title(f"{asked}{' --in-parts' if in_parts else ''}", machine)
    ceilings, accounts = measure_ceilings(), []
    for contender in running:
        with console.status(f"{contender.name}: compiling and profiling"):
            accounts.append(take_account(ACCOUNT_MODELS[model], contender, ceilings, in_parts=in_parts))
        console.print(account_table(accounts[-1], ACCOUNT_MODELS[model].name))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_account(accounts, ceilings, out / "account.csv", machine)
            (out / "account.png").write_bytes(draw_account(accounts, caption))
    if out is not None:
        console.print(f"wrote {out / 'account.csv'} and {out / 'account.png'}", highlight=False)
    typer.echo(follow_up("train", "--recipe", f"bf16,{recipes[0]}", "--compile"))
    return 0


def _machine(device: str) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, emulated",
        "torch": torch.__version__,
        "narrowcast": __version__,
        "date": f"{datetime.now():%Y-%m-%d}",
    }


def _title(what: str, machine: dict[str, str]) -> str:
    return (
        f"narrowcast bench {what}: {machine['device']}, torch {machine['torch']}, "
        f"narrowcast {machine['narrowcast']}, {machine['date']}"
    )


def _told(result: Result) -> str:
    memory = "" if result.memory is None else f", {result.memory:,.0f} MiB"
    rounds = f" ({spread(result)})" * (result.low is not None)
    return result.note if result.ms is None else f"{result.ms:.3f} ms{rounds}{memory}"
