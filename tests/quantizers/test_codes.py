"""FP8 codes as the matrices of a GEMM."""

from __future__ import annotations

import pytest
import torch

from narrowcast.formats import E4M3, E5M2
from narrowcast.quantizers.codes import codes_as_matrix

CODES = torch.arange(24, dtype=torch.uint8)


@pytest.mark.parametrize("element, dtype", [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
@pytest.mark.parametrize("columnwise", [False, True])
def test_a_matrix_is_a_view_of_the_codes_in_their_dtype(element, dtype, columnwise):
    codes = CODES.view(4, 6)
    matrix = codes_as_matrix(codes, element, columnwise)
    assert matrix.dtype == dtype and matrix.data_ptr() == codes.data_ptr()
    assert torch.equal(matrix.view(torch.uint8), codes)


def test_leading_dims_are_rows_of_row_wise_codes():
    matrix = codes_as_matrix(CODES.view(2, 3, 4), E4M3, columnwise=False)
    assert torch.equal(matrix.view(torch.uint8), CODES.view(6, 4))


def test_leading_dims_are_the_contraction_of_column_wise_codes():
    matrix = codes_as_matrix(CODES.view(4, 2, 3), E4M3, columnwise=True)
    assert torch.equal(matrix.view(torch.uint8), CODES.view(4, 6))


def test_one_dim_is_one_row_or_one_column():
    assert codes_as_matrix(CODES, E4M3, columnwise=False).shape == (1, 24)
    assert codes_as_matrix(CODES, E4M3, columnwise=True).shape == (24, 1)
