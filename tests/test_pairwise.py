"""The rows chosen of an option matrix hold every pair of values that the whole matrix holds."""

from __future__ import annotations

import itertools
import random

import pytest
from pairwise import pairs, pairwise

pytest_plugins = ["pytester"]


def all_pairs(rows: list[tuple]) -> set:
    return set().union(*map(pairs, rows))


@pytest.mark.parametrize("sizes", [(4,), (3, 5), (6, 37, 7), (2, 3, 4, 5, 2)])
def test_every_pair_is_held(sizes: tuple[int, ...]) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[index] for index in pairwise(rows)]
    assert all_pairs(chosen) == all_pairs(rows)
    assert len(chosen) == len(set(chosen)) <= len(rows)


@pytest.mark.parametrize("seed", range(5))
def test_only_pairs_that_can_exist_are_sought(seed: int) -> None:
    generator = random.Random(seed)
    rows = [row for row in itertools.product("abc", range(9), "uvwx") if generator.random() < 0.4]
    chosen = [rows[index] for index in pairwise(rows)]
    assert all_pairs(chosen) == all_pairs(rows)
    assert len(chosen) < len(rows)


def test_far_fewer_rows_of_three_factors() -> None:
    rows = list(itertools.product(range(6), range(30), range(7)))
    assert 30 * 7 <= len(pairwise(rows)) < 1.2 * 30 * 7 < len(rows) / 4


def test_the_same_rows_each_time() -> None:
    rows = list(itertools.product("abc", range(7), "uvwx"))
    assert pairwise(rows) == pairwise(list(rows))
    assert pairwise([]) == []


MATRIX_FILE = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("c", [{}, []])
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("a", range(5))
def test_matrix(a, b, c): ...

@pytest.mark.parametrize("a", range(3))
def test_plain(a): ...
"""


@pytest.mark.parametrize(
    "arguments, passed",
    [((), 20 + 3), (("--full-matrix",), 40 + 3), (("-k", "3-2-c0"), 1)],
)
def test_the_mark_thins_a_test_unless_the_full_matrix_is_wanted(
    arguments: tuple[str, ...], passed: int, pytester: pytest.Pytester, request: pytest.FixtureRequest
) -> None:
    pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    pairwise\n")
    pytester.makepyfile(MATRIX_FILE)
    pytester.inline_run("-p", "no:cacheprovider", *arguments).assertoutcome(passed=passed)
