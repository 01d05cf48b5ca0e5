"""The comparison: gaps, verdicts, and their three renderings."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from narrowcast_tools.colors import color_of
from narrowcast_tools.schemes import WIDTH
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.data import Corpus
from narrowcast_tools.train.document import compose
from narrowcast_tools.train.history import History, RunResult
from narrowcast_tools.train.pace import Pace
from narrowcast_tools.train.picture import caption, draw, figure
from narrowcast_tools.train.report import (
    SHORTEST_JUDGED,
    Row,
    alone,
    columns,
    compare,
    markdown_table,
    remarks,
    rows_to_json,
    terminal_table,
)

FACTS = {
    "cpu": "Some CPU",
    "cores": 2,
    "threads": 2,
    "python": "3.11",
    "torch": "2.13",
    "narrowcast": "1",
    "system": "S",
}


def result(recipe: str, loss: float, steps: int = 240) -> RunResult:
    held_out = [(0, 5.545), (10, 3.0), (steps, loss)]
    return RunResult(recipe, History([5.0] * steps, held_out), steps, 1000, Pace(12345.6), 61.0)


def figures(run: Callable[[], object]) -> list[Figure]:
    """Return the figures that a function saves."""
    drawn: list[Figure] = []
    save = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
        run()
    return drawn


def _title(drawn: Figure) -> str:
    return drawn.legends[0].get_title().get_text().replace("\n", " ")


def _foot(drawn: Figure) -> str:
    return drawn.get_supxlabel().replace("\n", " ")


@pytest.fixture
def rows() -> list[Row]:
    return compare([result("bf16", 2.0), result("current", 2.01), result("mxfp8", 2.1), result("nvfp4", 1.9)])


def test_gaps_are_relative_to_bf16(rows: list[Row]) -> None:
    assert [round(row.gap_percent, 6) for row in rows] == [0.0, 0.5, 5.0, -5.0]
    assert [(row.seed_range, row.place) for row in rows] == 4 * [(None, "")]


def test_the_baseline_is_needed() -> None:
    with pytest.raises(ValueError, match="no bf16 run"):
        compare([result("current", 2.0), result("nvfp4", 2.0)])


def test_seeds_are_one_row() -> None:
    """A gap compares equal seeds, and is judged by the range of bf16's."""
    runs = [
        ("bf16", 0, 2.0),
        ("bf16", 1, 2.04),
        ("current", 0, 2.02),
        ("current", 1, 2.05),
        ("nvfp4", 1, 2.2),
    ]
    several = compare([replace(result(name, loss), seed=seed) for name, seed, loss in runs])
    assert [row.seeds for row in several] == [[0, 1], [0, 1], [1]]
    assert several[1].spread == (2.02, 2.05)
    assert several[1].gap_percent == pytest.approx(50 * (2.02 / 2.0 + 2.05 / 2.04 - 2))
    assert several[1].seed_gaps == pytest.approx([1.0, 100 * (2.05 / 2.04 - 1)])
    assert several[2].gap_percent == pytest.approx(100 * (2.2 / 2.04 - 1))
    assert several[0].seed_range == pytest.approx((-100 / 101, 100 / 101))
    assert [row.place for row in several] == ["within", "within", "above"]
    shown = [texts[1] for texts in columns(several, timed=False).values()]
    assert shown[1:] == ["2.0350 (2.0200 to 2.0500)", "+0.75%", "within"]
    (drawn,) = figures(lambda: draw(several, subtitle="seeds"))
    keys = [text.get_text().replace("\n", " ") for text in drawn.legends[0].get_texts()]
    assert keys == ["bf16", "FP8 current", "NVFP4", "bf16's 2 seeds", "a seed", "mean"]
    assert "A gap compares runs of one seed; curves are means over seeds." in _foot(drawn)
    assert _title(drawn) == "Above the range of bf16's 2 seeds: NVFP4 (+7.84%); within: FP8 current"


def test_terminal_table(rows: list[Row]) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal_table(rows))
    lines = [line for line in console.file.getvalue().splitlines() if "FP8 current" in line]
    assert len(lines) == 1
    for part in ("2.0100", "+0.50%", "12,346", "1:01"):
        assert part in lines[0]
    assert "bf16's seeds" not in console.file.getvalue(), "one seed judges nothing"


def test_a_short_run_on_a_cpu_shows_its_gap_and_no_verdict_or_speed() -> None:
    short = compare([result("bf16", 2.0, 30), result("current", 2.01, 30)])
    shown = columns(short, timed=False)
    assert list(shown) == ["recipe", "held-out loss", "gap to bf16"] and shown["gap to bf16"] == [
        "-",
        "+0.50%",
    ]
    assert remarks(short, timed=False) == [
        "30 steps are too few to rank recipes: losses differ by chance; take 240 or more.",
        "A CPU emulates low precision: it rounds values as a GPU does, and is slower.",
    ]
    (row,) = compare([result("bf16", 2.0)])
    assert remarks([replace(row, held_out=[(1, 2.0)])] * 2, timed=True) == [
        "1 step is too few to rank recipes: losses differ by chance; take 240 or more."
    ]
    assert remarks(compare([result("bf16", 2.0)]) * 2, timed=True) == [
        "One seed of bf16 ranks no recipe: another seed moves losses, too; --seeds 3 shows how far."
    ]
    two = compare([replace(result("bf16", 2.0), seed=seed) for seed in range(2)])
    assert remarks(two * 2, timed=True) == []


def test_the_range_of_bf16s_seeds_is_the_only_limit_and_the_only_band() -> None:
    """The limit was decreed: 1%, unless seeds ended farther apart. Gray was the limit, bf16 and the range."""
    runs = [("bf16", 0, 2.0), ("bf16", 1, 2.2), ("nvfp4", 0, 2.3), ("nvfp4", 1, 2.2)]
    rows = compare([replace(result(name, loss), seed=seed) for name, seed, loss in runs])
    assert rows[1].seed_gaps == pytest.approx([15.0, 0.0])
    assert columns(rows, timed=False)["bf16's seeds"] == ["-4.76 to +4.76%", "above"]
    drawn = figures(lambda: draw(rows, subtitle="seeds"))[0]
    _, ends, gaps = drawn.axes
    assert gaps.get_ylim() == ends.get_xlim(), "one scale"
    low, high = ends.get_xlim()
    assert low < -100 / 21 and high > 15.0
    dots = [list(line.get_xdata()) for line in ends.lines if line.get_marker() == "o"]
    assert dots == [pytest.approx([15.0, 0.0])]
    (band,), (over_steps,) = ends.patches, gaps.collections
    assert (band.get_x(), band.get_width()) == pytest.approx((-100 / 21, 200 / 21))
    last = [y for x, y in over_steps.get_paths()[0].vertices if x == 240]
    assert (min(last), max(last)) == pytest.approx((-100 / 21, 100 / 21))


def test_the_title_says_which_recipes_are_above_the_range_of_bf16s_seeds() -> None:
    def title(**recipes: float) -> str:
        runs = [("bf16", 0, 1.98), ("bf16", 1, 2.02)]
        runs += [(name, seed, loss + (seed - 0.5) / 25) for name, loss in recipes.items() for seed in (0, 1)]
        rows = compare([replace(result(name, loss), seed=seed) for name, seed, loss in runs])
        return _title(figures(lambda: draw(rows, subtitle=""))[0])

    range_ = "the range of bf16's 2 seeds"
    assert title(current=2.01) == f"The loss of FP8 current is within {range_}"
    assert title(current=1.9) == f"The loss of FP8 current is below {range_}"
    assert title(current=2.01, block=1.9) == f"The loss of every recipe is within or below {range_}"
    assert title(current=2.1) == f"Above {range_}: FP8 current (+5.00%)"
    many = {"current": 2.1, "delayed": 2.0, "block": 2.0, "mxfp8": 2.0}
    assert title(**many) == f"Above {range_}: FP8 current (+5.00%); within: the other 3"


def test_each_recipe_stands_in_a_row_with_its_seeds_and_its_gap_below_its_name() -> None:
    """The gap and the seeds were columns far right of the dots; then lines ran through numbers beside the dots."""
    runs = [("bf16", 0, 2.0), ("bf16", 1, 2.2), ("nvfp4", 0, 2.1)]
    rows = compare([replace(result(name, loss), seed=seed) for name, seed, loss in runs])
    ends = figures(lambda: draw(rows, subtitle="seeds"))[0].axes[1]
    (name,) = ends.get_yticklabels()
    assert (name.get_text(), name.get_color()) == ("NVFP4\n1 seed\n+5.00%", "black"), (
        "yellow was hard to read"
    )
    (tick,) = ends.yaxis.get_major_ticks()
    assert tick.tick1line.get_markeredgecolor() == color_of("nvfp4")
    alike = compare([result(name, loss) for name, loss in (("bf16", 2.0), ("nvfp4", 2.1), ("current", 1.99))])
    ends = figures(lambda: draw(alike, subtitle="one"))[0].axes[1]
    named = [text.get_text() for text in ends.get_yticklabels()]
    assert named == ["NVFP4\n+5.00%", "FP8 current\n\u22120.50%"]
    assert not ends.texts


@pytest.mark.parametrize("losses", [[2.0, 1.2], [2.0, 60.0, 1.97], [2.0] * 7])
@pytest.mark.parametrize("wide", [True, False])
def test_names_and_gaps_of_rows_do_not_overlap(losses: list[float], wide: bool) -> None:
    """A long name ran into the one below, and a number near the left edge into its name."""
    names = ("bf16", "delayed", "current", "rowwise", "mxfp8", "block", "nvfp4")
    runs = compare([result(name, loss) for name, loss in zip(names, losses)])
    long = "FP8 current (bf16: layers 0 to 3, head: FP8 128-block, table 3fa5b2)"
    drawn = figure([*runs[:-1], replace(runs[-1], title=long)], subtitle="", wide=wide)
    drawn.canvas.draw()
    boxes = [text.get_window_extent() for text in drawn.axes[1 if wide else -1].get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in zip(boxes, boxes[1:]))


def test_a_gap_that_rounds_to_nothing_has_no_sign() -> None:
    """A title said "more than 0.00% above", and a label "+0.00%"."""
    for loss in (2.0, 2.00004, 1.99996):
        rows = compare([result("bf16", 2.0), result("current", loss)])
        drawn = figures(lambda: draw(rows, subtitle=""))[0]
        assert _title(drawn) == "After 240 steps, FP8 current's loss differs from bf16's by 0.00%"
        assert drawn.axes[1].get_yticklabels()[0].get_text() == "FP8 current\n0.00%"
    both = compare([result(name, 2.0) for name in ("bf16", "current", "block")])
    title = _title(figures(lambda: draw(both, subtitle=""))[0])
    assert title == "After 240 steps, losses differ from bf16's by 0.00%"


def test_curves_that_coincide_are_told_apart_by_their_gaps() -> None:
    """The first drop set the scale, the curves lay on each other, and the legend named bf16 alone."""
    runs = [result(name, loss) for name, loss in (("bf16", 2.0), ("current", 2.004), ("nvfp4", 1.996))]
    curve = [(0, 5.5), (30, 3.5), (60, 2.5), (120, 2.2)]
    runs = [replace(run, history=History([], [*curve, (240, run.held_out_loss)])) for run in runs]
    rows = compare(runs)
    losses, _, gaps = figures(lambda: draw(rows, subtitle=""))[0].axes
    assert losses.get_ylim()[1] < 3 and [list(line.get_xdata()) for line in losses.lines] == 3 * [
        [60, 120, 240]
    ]
    ends = [list(line.get_ydata())[-1] for line in gaps.lines]
    assert ends == pytest.approx([0.0, 0.2, -0.2]) and list(gaps.lines[0].get_xdata()) == [60, 120, 240]
    drawn = figure(rows, subtitle="")
    assert "Curves leave out the steep part before step 60." in _foot(drawn)
    assert [text.get_text() for text in drawn.legends[0].get_texts()][:3] == ["bf16", "FP8 current", "NVFP4"]
    assert "steep" not in _foot(figure(compare([result("bf16", 2.0), result("current", 2.0)]), subtitle=""))


def test_the_title_says_what_the_labels_say(rows: list[Row]) -> None:
    """One seed was judged ("Worse than bf16"); a hundredth of a percent looked like distance."""
    close = compare([result("bf16", 2.0), result("current", 2.001), result("nvfp4", 2.00388)])
    drawn = figures(lambda: draw(close, subtitle="close"))[0]
    _, ends, gaps = drawn.axes
    low, high = ends.get_xlim()
    assert low < -0.25 and high > 0.25
    assert not ends.patches and not gaps.collections, "one seed has no range"
    assert _title(drawn) == "After 240 steps, losses differ from bf16's by +0.05% to +0.19%"
    assert "NVFP4\n+0.19%" in [text.get_text() for text in ends.get_yticklabels()]
    assert "One seed of bf16 ranks no recipe: another seed moves losses, too" in _foot(drawn)
    far = figures(lambda: draw(rows, subtitle="far"))[0]
    assert _title(far) == "After 240 steps, losses differ from bf16's by \u22125.00% to +5.00%"
    short = compare([result("bf16", 2.0, 30), result("current", 2.01, 30)])
    drawn = figures(lambda: draw(short, subtitle="short"))[0]
    assert _title(drawn) == "After 30 steps, FP8 current's loss differs from bf16's by +0.50%"
    assert "30 steps are too few to rank recipes: losses differ by chance" in _foot(drawn)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["bf16", "FP8 current"]
    dead = compare([result("bf16", 5.54), result("current", 5.53)])
    drawn = figures(lambda: draw(dead, subtitle="dead"))[0]
    assert _title(drawn) == "bf16 has not learned: its loss went from 5.54 to 5.54"


@pytest.mark.filterwarnings("error")
def test_equal_losses_draw_without_a_warning() -> None:
    for rows in (
        compare([result("bf16", 2.0, 30)]),
        compare([result("bf16", 2.0, 30), result("current", 2.0, 30)]),
        compare([result("bf16", 2.0), result("current", 2.0)]),
    ):
        low, high = figures(lambda: draw(rows, subtitle="equal"))[0].axes[0].get_ylim()
        assert low < 2.0 < high


@pytest.mark.filterwarnings("error")
def test_no_text_is_cut_at_an_edge(rows: list[Row]) -> None:
    """The last letter of a line, the minus signs of the ticks and long names were outside of the image."""
    long = "my_recipes.py:HybridBlockScaledRecipe (layers 0 and 15: FP8 current, head: bf16)"
    named = [replace(rows[0]), replace(rows[1], title=long), *rows[2:]]
    short = compare([result(name, 2.0, 30) for name in ("bf16", "current", "block")])
    for some in (rows, named, short, rows[:1]):
        told = "434,816 parameters, bytes of /a/rather/long/path/of/text.txt: 20 steps of 8 sequences of 64"
        drawn = figures(lambda: draw(some, subtitle=f"{told}, {told}"))[0]
        box, edge = drawn.get_tightbbox(), 2 / 72
        assert -edge <= box.x0 and box.x1 <= drawn.get_figwidth() + edge
        assert -edge <= box.y0 and box.y1 <= drawn.get_figheight() + edge


def test_a_run_alone_shows_its_loss(rows: list[Row]) -> None:
    """Two panels of percent above itself were empty below the title."""
    drawn = figures(lambda: draw(rows[:1], subtitle="alone"))[0]
    (axes,) = drawn.axes
    assert list(axes.lines[0].get_ydata()) == [5.545, 3.0, 2.0]
    assert axes.get_title(loc="left") == "Held-out loss, nats per byte"
    assert _foot(drawn) == "Held-out text is not trained on. alone"
    title = drawn.get_suptitle().replace("\n", " ")
    assert title == "bf16: held-out loss fell from 5.54 to 2.00"
    for worse, told in (
        ([(0, 2.0), (10, 3.0)], "rose from 2.00 to 3.00"),
        ([(10, 3.0)], "is 3.00"),
        (
            [(0, 5.62), (100, 1.73), (200, 1.89)],
            "fell from 5.62 to 1.73 at step 100, 1.89 at the end",
        ),
    ):
        drawn = figures(lambda: draw([replace(rows[0], held_out=worse)], subtitle=""))[0]
        assert drawn.get_suptitle().replace("\n", " ") == f"bf16: held-out loss {told}"


def test_a_low_precision_run_alone_shows_its_batches_too() -> None:
    """It had no picture: a comparison needs bf16."""
    run = result("current", 2.0, 30)
    drawn = figures(lambda: draw([alone(run)], subtitle="alone", train=run.history.train))[0]
    (axes,) = drawn.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [30 * [5.0], [5.545, 3.0, 2.0]]
    assert list(axes.lines[0].get_xdata()) == list(range(1, 31))
    assert _title(drawn) == "FP8 current: held-out loss fell from 5.54 to 2.00"
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["held-out text", "training batch"]


def test_losses_over_the_steps_are_drawn_on_those_of_bf16(rows: list[Row]) -> None:
    """Gaps over the steps were drawn, and no loss."""
    axes = figures(lambda: draw(rows, subtitle="losses"))[0].axes[0]
    assert axes.get_title(loc="left") == "Held-out loss, nats per byte"
    widest, *curves = axes.lines
    assert [list(curve.get_ydata())[-1] for curve in axes.lines] == [2.0, 2.01, 2.1, 1.9]
    assert all(
        curve.get_linewidth() < widest.get_linewidth() and curve.get_zorder() > widest.get_zorder()
        for curve in curves
    )


def test_the_image_of_a_comparison_fits_a_screen_and_that_of_a_page_a_phone() -> None:
    """It was a tower of 1287 x 2323 pixels."""
    names = ("bf16", "delayed", "current", "rowwise", "mxfp8", "block", "nvfp4")
    image = draw(compare([result(name, 2.0 + i / 1000) for i, name in enumerate(names)]), subtitle="a text")
    width, height = (int.from_bytes(image[i : i + 4], "big") for i in (16, 20))
    assert 1500 < width < 1700 and 900 < height < 1300
    assert figure(compare([result(name, 2.0) for name in names]), subtitle="").get_figwidth() == WIDTH


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_run_alone_has_its_recipes_color_and_its_resume_is_marked(recipe: str) -> None:
    """bf16 was drawn in the blue of FP8 current."""
    run = result(recipe, 2.0, 30)
    drawn = figures(lambda: draw([alone(run)], subtitle="", train=run.history.train, resumed=20))[0]
    *curves, resumed = drawn.axes[0].lines
    assert {curve.get_color() for curve in curves} == {color_of(recipe)}
    assert list(resumed.get_xdata()) == [20, 20]
    assert drawn.legends[0].get_texts()[-1].get_text() == "resumed at step 20"


def test_the_foot_leaves_the_machine_to_the_results_and_emulation_to_what_is_emulated(
    rows: list[Row],
) -> None:
    """A fifth of the picture was the processor and versions; bf16 alone was told that a CPU emulates it."""
    told = {"parameters": 434816, "text": "bytes of my.txt"}
    named, on_a_cpu = (
        "434,816 parameters; bytes of my.txt",
        "434,816 parameters, emulated on a CPU; bytes of my.txt",
    )
    assert caption(rows[1:2], timed=False, **told) == on_a_cpu, "a run alone, too"
    assert caption(rows[:1], timed=False, **told) == named == caption(rows, timed=True, **told)
    assert caption(rows, timed=False, **told) == on_a_cpu


def test_dots_that_coincide_are_seen_apart() -> None:
    runs = [("bf16", seed, 2.0) for seed in range(3)] + [("nvfp4", seed, 2.1) for seed in range(3)]
    rows = compare([replace(result(name, loss), seed=seed) for name, seed, loss in runs])
    ends = figures(lambda: draw(rows, subtitle="seeds"))[0].axes[1]
    for line in ends.lines:
        if line.get_marker() == "o":
            assert len(set(line.get_ydata())) == 3
    (band,) = ends.patches
    assert all(band.get_zorder() < line.get_zorder() for line in ends.lines), "covers no dot"


def test_markdown_table(rows: list[Row]) -> None:
    lines = markdown_table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    assert "| MXFP8 | 2.1000 | +5.00% | 12,346 | 1:01 |" in lines


def test_json_is_plain(rows: list[Row]) -> None:
    read = json.loads(json.dumps(rows_to_json(rows)))
    assert read[1]["recipe"] == "current"
    assert read[1]["place"] == ""
    assert read[1]["held_out"] == [[0, 5.545], [10, 3.0], [240, 2.01]]


def test_the_picture_is_a_png_of_readable_size(rows: list[Row]) -> None:
    image = draw(rows, subtitle="a test")
    assert image.startswith(b"\x89PNG")
    width, height = (int.from_bytes(image[i : i + 4], "big") for i in (16, 20))
    assert width >= 1200
    assert height >= 500


def test_the_page_names_machine_and_command(rows: list[Row], config: TrainConfig, corpus: Corpus) -> None:
    arguments = {
        "config": config,
        "corpus": corpus,
        "parameters": 1000,
        "machine": FACTS,
        "command": "narrowcast demo --seed 3",
        "picture": "assets/first-light",
    }
    page = compose(rows, **arguments)
    for part in (
        "Some CPU",
        "2 cores",
        "torch 2.13",
        "narrowcast demo --seed 3",
        'srcset="assets/first-light-dark.svg"',
        'srcset="assets/first-light-phone-dark.svg"',
        '<img src="assets/first-light-light.svg" alt="Loss by step, and each recipe\'s gap to bf16\'s at the end">',
    ):
        assert part in page
    assert "No gap is larger than 5.00%. One seed of bf16 ranks no recipe" in page.replace("\n", " ")
    assert markdown_table(rows, timed=False) in page
    assert max(len(line) for line in page.splitlines() if "<source " not in line) <= 110
    assert "\n- **Machine:** " in page


def test_the_page_has_the_command_for_readers(rows: list[Row], config: TrainConfig, corpus: Corpus) -> None:
    for option in ("--write-docs docs/page.md", "--write-docs=docs/page.md"):
        arguments = {
            "config": config,
            "corpus": corpus,
            "parameters": 1000,
            "machine": FACTS,
            "picture": "a",
        }
        page = compose(rows, command=f"narrowcast demo {option} --seed 3", **arguments)
        assert "```sh\nnarrowcast demo --seed 3\n```" in page


def test_a_recipe_alone_has_no_gap(rows: list[Row]) -> None:
    """The table had a column of gaps with a dash in it."""
    alone = [replace(rows[0], held_out=[(0, 5.545), (SHORTEST_JUDGED, 2.0)])]
    assert list(columns(alone, timed=False)) == ["recipe", "held-out loss"]
    assert remarks(alone, timed=False) == ["One recipe, nothing to compare; train another with --recipe."]
    assert remarks(rows[:1], timed=True) == remarks(alone, timed=False)
