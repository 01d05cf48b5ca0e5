"""Block scaling from the layout's record: buffers as described, no shared memory, square groups the same both ways."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from narrowcast import formats
from narrowcast.formats import E2M1, E2M3, E4M3, E5M2, ElementFormat, Layout
from narrowcast.reference import block_scaling
from narrowcast.reference.codecs import encode_e8m0, reciprocal_e8m0
from narrowcast.reference.scaling import reciprocal

CASES = [
    (formats.FLOAT8_BLOCK_1D, E4M3),
    (formats.FLOAT8_BLOCK_2D, E5M2),
    (formats.MXFP8, E4M3),
    (formats.MXFP6, E2M3),
    (formats.MXFP4, E2M1),
]
SHAPES = [(1, 1), (63, 33), (2, 65, 100), (0, 32), (32, 0)]


def rule_of(layout: Layout, fmt: ElementFormat) -> block_scaling.ScaleRule:
    def powers(amax):
        code = encode_e8m0(amax * fmt.max_reciprocal)
        return reciprocal_e8m0(code), code

    def ones(amax):
        scale = torch.ones_like(amax)
        return scale, reciprocal(scale)

    return powers if layout.buffers[1].dtype == "uint8" else ones


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout, fmt", CASES)
def test_buffers_are_those_that_the_layout_describes(layout, fmt, shape):
    x = torch.randn(shape)
    for rowwise, columnwise in [(True, False), (False, True), (True, True)]:
        buffers = block_scaling.quantize(
            x, layout, fmt, rule_of(layout, fmt), rowwise=rowwise, columnwise=columnwise
        )
        described = layout.describe(shape, rowwise, columnwise).values()
        assert [(tuple(b.shape), str(b.dtype)) for b in buffers] == [(s, f"torch.{d}") for s, d in described]
        assert all(buffer.is_contiguous() for buffer in buffers)
        held = [buffer.untyped_storage().data_ptr() for buffer in buffers if buffer.numel()]
        assert len(set(held)) == len(held)


@pytest.mark.parametrize("layout, fmt", CASES)
def test_decodes_what_it_encoded(layout, fmt):
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).repeat(64, 64)[:, :256]  # exact in every format
    for columnwise in (False, True):
        data, scales = block_scaling.quantize(
            x, layout, fmt, rule_of(layout, fmt), rowwise=not columnwise, columnwise=columnwise
        )
        values = block_scaling.dequantize(
            data, scales, fmt, torch.float32, layout=layout, columnwise=columnwise
        )
        assert torch.equal(values, x)


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_buffer_may_hold_the_scale_of_a_tile_for_each_of_its_lines(columnwise):
    layout = dataclasses.replace(formats.MXFP8, scale_group=(32, 32))
    x = torch.ones(96, 160) * (2.0 ** torch.arange(3)).repeat_interleave(32)[:, None]
    x *= (8.0 ** torch.arange(5)).repeat_interleave(32)
    data, scales = block_scaling.quantize(
        x, layout, E4M3, rule_of(layout, E4M3), rowwise=not columnwise, columnwise=columnwise
    )
    assert scales.shape == ((4, 256) if columnwise else (128, 8))
    values = block_scaling.dequantize(data, scales, E4M3, torch.float32, layout=layout, columnwise=columnwise)
    assert torch.equal(values, x)


@pytest.mark.parametrize("layout, fmt", [case for case in CASES if case[0] is not formats.FLOAT8_BLOCK_1D])
def test_square_groups_give_both_directions_the_same_values(layout, fmt):
    x = torch.randn(256, 384) * torch.logspace(-3, 3, 384)
    row, row_scale, column, column_scale = block_scaling.quantize(
        x, layout, fmt, rule_of(layout, fmt), rowwise=True, columnwise=True, tile=True
    )
    decoded = [
        block_scaling.dequantize(data, scale, fmt, torch.float32, layout=layout, columnwise=columnwise)
        for data, scale, columnwise in [(row, row_scale, False), (column, column_scale, True)]
    ]
    assert torch.equal(*decoded) and decoded[0].count_nonzero() > 0


def test_a_format_of_other_bits_is_refused():
    for layout, fmt in [(formats.MXFP8, E2M1), (formats.MXFP4, E4M3)]:
        with pytest.raises(ValueError, match=fmt.name):
            block_scaling.quantize(
                torch.ones(32, 32), layout, fmt, rule_of(layout, fmt), rowwise=True, columnwise=False
            )
