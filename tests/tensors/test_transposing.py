"""Column-wise buffers made of row-wise ones are those that the quantizer makes."""

from __future__ import annotations

import itertools

import pytest
import torch
from quantizers.catalog import VARIANTS, delayed, quantize
from reference.checks import assert_bitwise, normal

from narrowcast.tensors.transposing import transposed

SAME_BOTH_WAYS = ["current", "current e5m2", "mxfp8 2d", "block", "block fp32 scales", "nvfp4 2d", "delayed"]
OF_VECTORS = ["current", "block", "block fp32 scales"]
SHAPES = [(1, 16), (16, 1), (16, 16), (33, 50), (64, 96), (2, 3, 50), (130, 300), (640, 128), (128, 640)]


@pytest.mark.parametrize(
    "name, shape",
    [
        *itertools.product(SAME_BOTH_WAYS, SHAPES),
        *itertools.product(OF_VECTORS, [(7,), (300,)]),
    ],
    ids=str,
)
def test_equal_to_what_the_quantizer_makes(name, shape):
    quantizer = {**VARIANTS, "delayed": delayed()}[name]
    tensor = quantize(quantizer, normal(shape, torch.bfloat16))
    rowwise, expected = tensor.rowwise_operand(), tensor.columnwise_operand()
    before = [buffer.clone() for buffer in rowwise]
    made = transposed(list(rowwise), shape[-1])
    assert len(made) == len(expected)
    for index, (ours, theirs) in enumerate(zip(made, expected)):
        assert_bitwise(ours, theirs, f"buffer {index}")
    for buffer, old in zip(rowwise, before):
        assert_bitwise(buffer, old, "row-wise buffer")
