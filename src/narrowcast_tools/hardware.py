"""Rates of GPUs, networks and recipes; ``docs/scaling.md`` has the source of each."""

from __future__ import annotations

from typing import NamedTuple

from .colors import RECIPES as COLORS
from .words import find

TERA, GIGA, GIB = 1e12, 1e9, 2.0**30


class Gpu(NamedTuple):
    """One GPU and its share of the networks; bytes per second and direction, as they are reached."""

    name: str
    memory: float  # bytes that a program can hold
    peak: float  # dense bf16 operations per second of the data sheet: what MFU divides by
    copy: float  # bytes per second of a device copy, read and written
    link: float  # NVLink, in one host
    network: float  # InfiniBand, of the one card that a GPU has


GPUS = {
    "h100": Gpu("h100", 78 * GIB, 989 * TERA, 2.95 * TERA, 360 * GIGA, 40 * GIGA),
    "h200": Gpu("h200", 139 * GIB, 989 * TERA, 4.25 * TERA, 360 * GIGA, 40 * GIGA),
    "h800": Gpu("h800", 78 * GIB, 989 * TERA, 2.95 * TERA, 160 * GIGA, 40 * GIGA),
}
HOST = 8  # GPUs that NVLink joins
MEASURED = 2  # GPUs: the most of a step that was measured here
ERROR = "plans of one and two GPUs were within 6% of measured steps"
ERROR_DENSE = "expect 5 to 15% less speed"
ERROR_EXPERTS = "expect a quarter less speed, or lower; the plan of a report from 2,048 GPUs was 23% too fast"


class Rates(NamedTuple):
    """The rates of a step under a recipe."""

    fprop: float  # operations per second of a GEMM
    dgrad: float
    wgrad: float
    code: float  # bytes of an element of an operand
    quantize: float  # bytes moved per element that is quantized in both directions


RECIPES = {
    "bf16": Rates(690 * TERA, 690 * TERA, 690 * TERA, 2.0, 0.0),
    "delayed": Rates(1320 * TERA, 1270 * TERA, 1270 * TERA, 1.0, 4.0),
    "current": Rates(1320 * TERA, 1270 * TERA, 1270 * TERA, 1.0, 6.0),
    "block": Rates(1120 * TERA, 1120 * TERA, 925 * TERA, 1.03, 4.06),
}
OPTIMIZERS = {
    "adamw": (4.0, 4.0, 8.0),
    "adamw-bf16": (2.0, 2.0, 4.0),
    "fused-bf16": (2.0, 2.0, 2.0 + 4.0),
    "fused-int8": (2.0, 2.0, 2.0 + 2 * (1.0 + 8.0 / 128)),
    "fused-stochastic": (2.0, 2.0, 2 * (1.0 + 8.0 / 128)),
}
"""Bytes of a weight, its gradient and its optimizer state: AdamW with everything in fp32 or in bf16; ``FusedAdam`` with
bf16 weights, moments in bf16 or codes of 8 bits, and the remainders of fp32 master weights or stochastic rounding.
"""
CODED = 1.0 + 4.0 / 128  # bytes of an element of a saved activation in codes
# operations per second of attention in bf16, forward and backward, causal ones counted
ATTENTION = 350 * TERA
ELEMENTWISE = 0.75  # share of a copy's bandwidth that norms, activations and quantizing reach
STOLEN = 20 / 132  # share of the multiprocessors that communication takes while it is overlapped
BATCH = 16 * 2**20  # tokens of a step on many GPUs
BATCH_PER_GPU = 128 * 2**10  # on few: some seconds a step
RESERVE = 0.92  # share of the memory that a plan may fill


def find_gpu(name: str) -> Gpu:
    """Return a GPU; ValueError for an unknown name."""
    return find(name, GPUS, "--gpu", suggest=False)


def find_optimizer(name: str) -> tuple[float, float, float]:
    """Return the bytes of a weight, its gradient and its state; ValueError for an unknown name."""
    return find(name, OPTIMIZERS, "--optimizer")


def find_rates(recipe: str) -> Rates:
    """Return the rates of a recipe; ValueError for one without GEMMs on these GPUs."""
    if "," in recipe:
        raise ValueError(
            f"--recipe is {recipe!r:.60}, and a plan takes one recipe; give one, bf16 is shown beside it"
        )
    why = ", for which these GPUs have no measured rates" if recipe in COLORS else ""  # every recipe has one
    return find(recipe, RECIPES, "--recipe", why)
