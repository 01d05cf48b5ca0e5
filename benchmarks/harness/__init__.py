"""What every benchmark shares: shapes, timing, the description of the machine, the table, the rows and the plot."""

from .contenders import SWEEP, Table, compiled, gate, measure, summarize
from .machine import Row, machine
from .ranks import is_late, report_of_ranks
from .report import append, parser, report, runs_on_gpu
from .shapes import FFN, HIDDEN, TENSORS, Shape
from .steps import Step, captured, measure_steps, saved_mib, step_of
from .timing import ring, spread, time_in_turns, time_ms

__all__ = [
    "FFN",
    "HIDDEN",
    "SWEEP",
    "TENSORS",
    "Row",
    "Shape",
    "Step",
    "Table",
    "append",
    "captured",
    "compiled",
    "gate",
    "is_late",
    "machine",
    "measure",
    "measure_steps",
    "parser",
    "report",
    "report_of_ranks",
    "ring",
    "runs_on_gpu",
    "saved_mib",
    "spread",
    "step_of",
    "summarize",
    "time_in_turns",
    "time_ms",
]
