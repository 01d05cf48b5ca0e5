"""The tolerance table. Every comparison that is not exact names an entry of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import relative_error


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted ``relative_error``, and its reason."""

    relative: float
    reason: str


TOLERANCES = {
    "exact": Tolerance(0.0, "the same operators ran on the same bytes"),
    "fp32_sum_order": Tolerance(2.0**-20, "fp32 accumulation in another order"),
    "fp32_layer": Tolerance(2.0**-16, "fp32 sums in another order, through several products and softmax"),
    "bf16_output": Tolerance(2.0**-8, "one rounding of the result to bf16"),
    "fast_accumulation": Tolerance(
        2.0**-7, "Hopper tensor cores keep about 14 bits while they accumulate FP8"
    ),
    "fp8_flips": Tolerance(3e-2, "an ulp of bf16 before a quantizer flips some FP8 roundings"),
    "fp4_flips": Tolerance(7e-2, "an ulp of bf16 before a quantizer flips some FP4 roundings"),
    "fp8_layer": Tolerance(6e-2, "a linear layer in FP8 against the same layer in high precision"),
    "fp4_layer": Tolerance(2.5e-1, "a linear layer in NVFP4 against the same layer in high precision"),
    "fp8_other_scales": Tolerance(1.2e-1, "FP8 layers against the same layers in FP8 under other scales"),
    "fp4_other_scales": Tolerance(3.5e-1, "NVFP4 layers against the same layers in NVFP4 under other scales"),
    "fp8_saved_activations": Tolerance(
        1.2e-1,
        "gradients of FP8 layers whose norms and activations read E4M3 codes of their inputs, and attention int8 codes",
    ),
    "training_loss": Tolerance(
        2e-2, "final loss: scaling the initial weights by 1 + 1e-5 moves it by about half that"
    ),
}


def assert_close(actual: Tensor, expected: Tensor, entry: str) -> None:
    """Assert that ``relative_error`` stays within an entry of the table.

    Raises:
        AssertionError: it does not, or a value is NaN; the message gives error, entry and reason.
    """
    tolerance = TOLERANCES[entry]
    error = relative_error(actual, expected)
    if not error <= tolerance.relative:
        raise AssertionError(
            f"relative error {error:.3e} exceeds {entry} = {tolerance.relative:.3e} ({tolerance.reason})"
        )


def assert_within_magnitude(actual: Tensor, expected: Tensor, magnitude: Tensor, factor: float) -> None:
    """Assert |actual - expected| <= factor * magnitude + rounding of ``actual``'s dtype, element by element.

    Args:
        magnitude: |A| @ |B| of the product, which bounds what the order of summation can change.
        factor: share of it, e.g. 2**-20 for fp32 accumulation.
    """
    difference = (actual.double() - expected.double()).abs()
    rounding = torch.finfo(actual.dtype).eps * expected.double().abs()
    excess = difference - (factor * magnitude.double() + rounding)
    if not bool((excess <= 0).all()):
        raise AssertionError(f"off by {excess.max().item():.3e} beyond {factor:.2e} of the summed magnitudes")
