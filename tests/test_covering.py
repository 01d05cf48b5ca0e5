"""The rows chosen of an option matrix hold every two values that meet anywhere in the whole matrix."""

from __future__ import annotations

import itertools
import random

import pytest
from covering import covering, values_that_meet

pytest_plugins = ["pytester"]


def all_that_meet(rows: list[tuple], strength: int) -> set:
    return set().union(*(values_that_meet(row, strength) for row in rows))


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(4,), (3, 5), (6, 37, 7), (2, 3, 4, 5, 2)])
def test_all_values_that_meet_are_held(sizes: tuple[int, ...], strength: int) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[index] for index in covering(rows, strength)]
    assert all_that_meet(chosen, strength) == all_that_meet(rows, strength)
    assert len(chosen) == len(set(chosen)) <= len(rows)


@pytest.mark.parametrize("seed", range(5))
def test_only_pairs_that_can_exist_are_sought(seed: int) -> None:
    generator = random.Random(seed)
    rows = [row for row in itertools.product("abc", range(9), "uvwx") if generator.random() < 0.4]
    chosen = [rows[index] for index in covering(rows)]
    assert all_that_meet(chosen, 2) == all_that_meet(rows, 2)
    assert len(chosen) < len(rows)


def test_far_fewer_rows_of_three_factors() -> None:
    rows = list(itertools.product(range(6), range(30), range(7)))
    assert 30 * 7 <= len(covering(rows)) < 1.2 * 30 * 7 < len(rows) / 4
    assert len(covering(rows, 1)) == 30


def test_the_same_rows_each_time() -> None:
    rows = list(itertools.product("abc", range(7), "uvwx"))
    assert covering(rows) == covering(list(rows))
    assert covering([]) == []


MATRICES = """
import pytest

@pytest.mark.covering
@pytest.mark.parametrize("c", [{}, []])
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("a", range(5))
def test_pairs(a, b, c): ...

@pytest.mark.covering(1)
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("a", range(5))
def test_values(a, b): ...

@pytest.mark.parametrize("a", range(3))
def test_plain(a): ...
"""


@pytest.mark.parametrize(
    "arguments, passed",
    [((), 20 + 5 + 3), (("--full-matrix",), 40 + 20 + 3), (("-k", "test_pairs and 3-2-c0"), 1)],
)
def test_the_mark_thins_a_test_unless_the_full_matrix_is_wanted(
    arguments: tuple[str, ...], passed: int, pytester: pytest.Pytester, request: pytest.FixtureRequest
) -> None:
    pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
    pytester.makepyfile(MATRICES)
    pytester.inline_run("-p", "no:cacheprovider", *arguments).assertoutcome(passed=passed)
