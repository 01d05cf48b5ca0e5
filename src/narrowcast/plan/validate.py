"""Measured and published steps, and what the model says of them; ``docs/scaling.md`` shows both."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from .estimate import Estimate, Layout, estimate
from .hardware import GPUS
from .models import MODELS, Model


class Case(NamedTuple):
    """A step that ran: what it reached, and how far off the model may be, as stated on the page."""

    name: str
    model: Model
    layout: Layout
    recipe: str
    gpu: str
    unit: str  # tokens/s/GPU, MFU, or GPU hours per trillion tokens
    reported: float
    error: float  # largest error as a share of what was reported
    memory: float = 0.0  # GiB at the peak, where it was measured

    def estimate(self) -> Estimate:
        """The model's step."""
        return estimate(self.model, self.layout, self.recipe, GPUS[self.gpu])

    def predicted(self) -> float:
        """The model's figure in the unit of the report."""
        result = self.estimate()
        hours = 1e12 / result.tokens_per_second / 3600
        return {"tokens/s/GPU": result.tokens_per_second, "MFU": result.mfu, "GPU hours": hours}[self.unit]


SLICE = replace(MODELS["8b"], name="8b, 4 layers", layers=4, vocabulary=32000)
ONE = Layout(1, 8192, 2048, micro_batch=4, state=(2.0, 2.0, 4.0))
TWO = Layout(2, 2 * 8192, 2048, micro_batch=4)
LLAMA = Layout(8192, 16 * 2**20, 8192, tp=8, pp=16, stages=8)
DEEPSEEK = Layout(2048, 15360 * 4096, 4096, pp=16, ep=64, stages=2, overlap_experts=True)

CASES = (
    Case("4 layers of 8B, 1 H200, bf16", SLICE, ONE, "bf16", "h200", "tokens/s/GPU", 90521, 0.1, 11.9),
    Case("the same, delayed", SLICE, ONE, "delayed", "h200", "tokens/s/GPU", 128852, 0.1, 11.6),
    Case("the same, current", SLICE, ONE, "current", "h200", "tokens/s/GPU", 126481, 0.1, 11.6),
    Case("the same, block", SLICE, ONE, "block", "h200", "tokens/s/GPU", 116041, 0.1, 11.6),
    Case("4 layers of 8B, 2 H200, FSDP2, bf16", SLICE, TWO, "bf16", "h200", "tokens/s/GPU", 82400, 0.1, 12.0),
    Case("the same, delayed", SLICE, TWO, "delayed", "h200", "tokens/s/GPU", 113400, 0.1, 12.0),
    Case("the same, current", SLICE, TWO, "current", "h200", "tokens/s/GPU", 110800, 0.1, 12.0),
    Case("Llama 3 405B, 8192 H100", MODELS["405b"], LLAMA, "bf16", "h100", "MFU", 0.43, 0.2),
    Case(
        "Llama 3 405B, 16384 H100",
        MODELS["405b"],
        replace(LLAMA, gpus=16384),
        "bf16",
        "h100",
        "MFU",
        0.41,
        0.2,
    ),
    Case(
        "the same, sequences of 131072",
        MODELS["405b"],
        replace(LLAMA, gpus=16384, length=131072, cp=16),
        "bf16",
        "h100",
        "MFU",
        0.38,
        0.2,
    ),
    Case("DeepSeek-V3, 2048 H800", MODELS["671b"], DEEPSEEK, "block", "h800", "GPU hours", 180_000, 0.3),
)
