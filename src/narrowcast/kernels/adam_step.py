"""The arithmetic of a step of Adam on a tile, for the kernel that steps and for those that also quantize."""

from __future__ import annotations

import triton
import triton.language as tl

from .codecs import product, reciprocal, round_to_dtype, to_float32
from .tiles import load_elements, store_elements


@triton.jit
def stepped(w, g, m, v, factors_ptr, DECAY: tl.constexpr):
    """Return weight and moments after a step, all fp32; the factors are those of ``_adam_factors_kernel``."""
    if DECAY == 1:
        g = g + product(w, tl.load(factors_ptr + 7))
    m = product(m, tl.load(factors_ptr + 3)) + product(g, tl.load(factors_ptr + 4))
    v = product(v, tl.load(factors_ptr + 5)) + product(g * g, tl.load(factors_ptr + 6))
    # A division would take its slow path for zero gradients; a reciprocal does not.
    inverse = reciprocal(tl.sqrt_rn(v) + tl.load(factors_ptr + 1))
    change = product(m * inverse, tl.load(factors_ptr))
    if DECAY == 2:
        change = change + product(w, tl.load(factors_ptr + 2))
    return w - change, m, v


@triton.jit
def joined(high, rest):
    """Return the fp32 values of ``reference.adam.join``."""
    bits = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (bits + rest.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def halves(w):
    """Return bf16 and int16 of ``reference.adam.split``."""
    bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
    high = (bits + 0x8000) >> 16
    return high.to(tl.int16).to(tl.bfloat16, bitcast=True), (bits - (high << 16)).to(tl.int16)


@triton.jit
def rounded_at_random(w, at, count):
    """Return bf16 of ``reference.adam.round_at_random``.

    Args:
        at: of each element, its place in the parameter.
        count: int32, of the step.
    """
    bits = w.to(tl.uint32, bitcast=True)
    x = bits ^ at.to(tl.uint32) ^ (count.to(tl.uint32) * 0x9E3779B1)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    bits = tl.where(w == w, bits + (x >> 16), 0x7FC00000)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def step_elements(
    operands,
    at,
    inside,
    DECAY: tl.constexpr,
    BESIDE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Step elements of a parameter in place and return them in its dtype."""
    weight = load_elements(operands[0] + at, inside, EVEN)
    g = to_float32(load_elements(operands[1] + at, inside, EVEN))
    m = to_float32(load_elements(operands[2] + at, inside, EVEN))
    v = to_float32(load_elements(operands[3] + at, inside, EVEN))
    if BESIDE == 2:
        w = joined(weight, load_elements(operands[4] + at, inside, EVEN))
    else:
        w = to_float32(weight)
    w, m, v = stepped(w, g, m, v, operands[5], DECAY)
    store_elements(operands[2] + at, round_to_dtype(m, operands[2].dtype.element_ty), inside, EVEN)
    store_elements(operands[3] + at, round_to_dtype(v, operands[3].dtype.element_ty), inside, EVEN)
    if BESIDE == 2:
        rounded, rest = halves(w)
        store_elements(operands[4] + at, rest, inside, EVEN)
    else:
        rounded = round_to_dtype(w, operands[0].dtype.element_ty)
    store_elements(operands[0] + at, rounded, inside, EVEN)
    if BESIDE == 1:
        rounded = round_to_dtype(w, operands[4].dtype.element_ty)
        store_elements(operands[4] + at, rounded, inside, EVEN)
    return rounded if EVEN else tl.where(inside, rounded, 0.0)
