"""FP8 rows and groups by the rules of inference engines, against the rules written out in numpy's fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from narrowcast.formats import E4M3, E5M2
from narrowcast.reference import float8_rows

from .checks import normal

F = np.float32


def by_hand(row: np.ndarray, rule: str, epsilon: float, smallest: float) -> tuple[np.ndarray, np.float32]:
    """Values that are cast to E4M3, and the scale, of one row: each step one rounding to fp32, or to bf16."""
    amax = max(np.abs(row).max(initial=F(0)), F(epsilon))
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
    bounds: dict[str, Any] = {"epsilon": 1e-10, "smallest": 0.0 if rule == "factors" else 1.0 / (448 * 512)}
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
