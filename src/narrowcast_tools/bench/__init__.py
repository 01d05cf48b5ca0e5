"""``narrowcast bench``: layers and whole models of this library beside bf16 and other packages, on this machine."""

from .measure import Result, contenders, measure
from .show import picture, table, write_csv
from .works import SUITES, Work, works

__all__ = ["SUITES", "Result", "Work", "contenders", "measure", "picture", "table", "works", "write_csv"]
