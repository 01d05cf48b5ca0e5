"""Identity: values pass through, cast where asked, and never share memory with their source."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, normal

import narrowcast as nc


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_pass_through(source: torch.dtype, kept: torch.dtype | None) -> None:
    x = normal((3, 5, 7), source)
    tensor = nc.IdentityQuantizer(dtype=kept).quantize(x)
    assert_bitwise(tensor._hp_data, x.to(kept or source))
    assert_bitwise(tensor.dequantize(), x.to(kept or source).to(source))
    tensor._hp_data.zero_()
    assert x.abs().sum() > 0
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}


def test_another_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="torch.float64; IdentityQuantizer casts to one of"):
        nc.IdentityQuantizer(dtype=torch.float64)
