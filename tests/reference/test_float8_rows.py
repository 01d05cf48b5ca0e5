"""FP8 rows and groups by the rules of training and of engines, against the rules written out in numpy's fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import narrowcast as nc
from narrowcast.formats import E4M3, E5M2
from narrowcast.reference import float8_rows

from .checks import normal

F = np.float32
BY_AMAX = ("factors", *float8_rows.TRAINING_RULES)  # without a lower bound of the scale


def by_hand(row: np.ndarray, rule: str, epsilon: float, smallest: float) -> tuple[np.ndarray, np.float32]:
    """Values that are cast to E4M3, and the scale, of one row: each step one rounding to fp32, or to bf16."""
    amax = max(np.abs(row).max(initial=F(0)), F(epsilon))
    if rule in float8_rows.TRAINING_RULES:
        factor = F(448) / amax
        factor = F(2) ** np.floor(np.log2(np.float64(factor))).astype(F) if "power_2" in rule else factor
        return row * factor, F(1) / factor
    if rule == "factors":
        return row * (F(448) / amax), amax * (F(1) / F(448))
    scale = amax * (F(1) / F(448)) if rule == "product" else amax / F(448)
    scale = max(in_bf16(scale) if rule == "bfloat16" else scale, F(smallest))
    scaled = row * (F(1) / scale) if rule == "reciprocal" else row / scale
    return in_bf16(scaled) if rule == "bfloat16" else scaled, scale


def in_bf16(x: Any) -> Any:
    """Return fp32 rounded to bf16 by its bits: half to even."""
    bits = np.asarray(x, F).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(F)


@pytest.mark.parametrize("rule", float8_rows.RULES)
@pytest.mark.parametrize("group", [0, 128])
def test_codes_and_scales_are_those_of_the_rule(rule: str, group: int) -> None:
    x = normal((7, 300), torch.bfloat16) * torch.logspace(-12, 3, 7).bfloat16()[:, None]
    bounds: dict[str, Any] = {"epsilon": 1e-10, "smallest": 0.0 if rule in BY_AMAX else 1.0 / (448 * 512)}
    codes, scale = float8_rows.quantize(x, E4M3, rule=rule, group=group, **bounds)
    values = x.float().numpy()
    for row in range(7):
        for i, start in enumerate(range(0, 300, group or 300)):
            part = values[row, start : start + (group or 300)]
            scaled, own = by_hand(part, rule, **bounds)
            expected = torch.from_numpy(scaled).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            assert torch.equal(codes[row, start : start + len(part)], expected)
            assert scale[i, row].item() == own


def test_the_rules_differ_in_the_last_bit() -> None:
    """Else one of them would do: scales of c / 64, and values at the middle between two codes."""
    c, middles = torch.arange(3.0, 999.0, 2.0)[:, None], torch.arange(17.0, 32.0, 2.0)
    x = torch.cat([c * middles, c * 448.0], 1) / 64
    made = {rule: float8_rows.quantize(x, E4M3, rule=rule) for rule in float8_rows.RULES}
    assert torch.equal(made["divide"][1], made["reciprocal"][1])
    assert not torch.equal(made["divide"][0], made["reciprocal"][0])
    assert not torch.equal(made["divide"][1], made["factors"][1])
    assert torch.equal(made["product"][1], made["factors"][1])
    assert not torch.equal(made["product"][0], made["divide"][0])
    assert torch.equal(made["divide"][1], c.t() / 64) and made["divide"][0][:, :8].remainder(2).eq(0).all()


@pytest.mark.parametrize("rule", float8_rows.RULES)
def test_zeros_nan_and_infinity(rule: str) -> None:
    x = torch.tensor([[0.0, -0.0], [float("nan"), 2.0], [float("inf"), 1.0]])
    codes, scale = float8_rows.quantize(x, E5M2, rule=rule)
    decoded = float8_rows.dequantize(codes, scale, E5M2, torch.float32)
    torch.testing.assert_close(
        decoded[1, 1], torch.tensor(2.0), rtol=2**-8 if rule == "bfloat16" else 0, atol=0
    )
    assert decoded[0].eq(0).all() and decoded[1, 0].isnan()
    assert decoded[2].isnan().all()
    empty = float8_rows.quantize(torch.empty(3, 0), E4M3, rule=rule)
    assert [tuple(buffer.shape) for buffer in empty] == [(3, 0), (1, 3)]


@pytest.mark.parametrize("rule", float8_rows.TRAINING_RULES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1), (4, 4), (0, 3), (3, 0)], ids=str)
def test_both_directions_are_rows_and_columns(shape: tuple[int, ...], rule: str) -> None:
    x = normal(shape, torch.bfloat16)
    made = float8_rows.quantize_both(x, E4M3, rule=rule, epsilon=1e-12)
    columns = x.flatten(0, -2).t().contiguous()
    rows, columns = (float8_rows.quantize(part, E4M3, rule=rule, epsilon=1e-12) for part in (x, columns))
    assert all(torch.equal(a, b) for a, b in zip(made, rows + columns))


def test_a_power_of_two_is_the_rule_of_per_tensor_scaling() -> None:
    """A tensor of one row has one scale under both."""
    x = normal((1, 300), torch.float32) * 3e-3
    codes, scale = float8_rows.quantize(x, E4M3, rule="training_power_2")
    current = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3, force_pow_2_scales=True)(x)
    assert torch.equal(codes, current._data) and scale.item() == current._scale_inv.item()
