"""Floating-point operations of a step by the model's shape, and the share of a GPU's peak that a run reaches."""

import re

import torch

from .config import ModelConfig

# Dense bfloat16 in TFLOP/s, from NVIDIA's data sheets, by how the driver's name begins. The first that fits decides,
# so the special ones stand first. What is not here has no peak: none is guessed.
PEAK_TFLOPS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA GH200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA A100": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
}


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the operations of forward and backward of the model's shape, without recomputation.

    Two for each weight of a GEMM and token, and for the attention, whose position sees half of the sequence on
    average, two GEMMs of `dim` by `seq_len / 2`; the backward takes twice the forward
    (Chowdhery et al., PaLM, appendix B, with the causal half counted once).
    """
    weights = config.layers * config.gemm_weights + config.vocabulary * config.dim
    attention = config.layers * config.dim * seq_len
    return 3 * 2 * (weights + attention)


def peak_flops(device: str) -> float | None:
    """Return the device's peak in dense bfloat16 per second; None without an entry in `PEAK_TFLOPS`."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    if " MIG " in name:  # a slice of one
        return None
    fits = (known for known in PEAK_TFLOPS if re.match(rf"{known}(?![\w.])", name))
    known = next(fits, None)
    return None if known is None else PEAK_TFLOPS[known] * 1e12
