"""Error metrics and the one tolerance table: for tests, benchmarks and users who compare runs."""

from .errors import aliased, relative_error
from .tolerances import TOLERANCES, Tolerance, assert_close, assert_within_magnitude

__all__ = ["TOLERANCES", "Tolerance", "aliased", "assert_close", "assert_within_magnitude", "relative_error"]
