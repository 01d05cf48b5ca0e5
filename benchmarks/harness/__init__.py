"""What every benchmark shares: shapes, timing, the description of the machine, the table, the rows and the plot."""

from .account import print_account
from .contenders import SWEEP, Table, compare, compiled, measure, summarize
from .machine import Row, machine
from .ranks import rank_ms, report_of_ranks, rows_in_turns, train_in_turns
from .report import append, parser, report, report_on_gpu
from .shapes import FFN, HIDDEN, TENSORS, Shape
from .steps import RECIPES, Step, captured, error_of, measure_steps, saved_mib, step_of
from .streams import print_streams
from .timing import by_turns, rates, ring, seconds_of, spread, time_in_turns

__all__ = [
    "FFN",
    "HIDDEN",
    "RECIPES",
    "SWEEP",
    "TENSORS",
    "Row",
    "Shape",
    "Step",
    "Table",
    "append",
    "by_turns",
    "captured",
    "compare",
    "compiled",
    "error_of",
    "machine",
    "measure",
    "measure_steps",
    "parser",
    "print_account",
    "print_streams",
    "rank_ms",
    "rates",
    "report",
    "report_of_ranks",
    "report_on_gpu",
    "ring",
    "rows_in_turns",
    "saved_mib",
    "seconds_of",
    "spread",
    "step_of",
    "summarize",
    "time_in_turns",
    "train_in_turns",
]
