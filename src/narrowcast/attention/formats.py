"""The shapes that attention is called with, and the one that backends compute in: (batch, heads, sequence, dim)."""

from __future__ import annotations

from torch import Tensor

from .._checks import is_one_of, not_among, shape_of, shown, tensor
from .._device import HIGH_PRECISION

FORMATS = ("sbhd", "bshd", "thd")
_DIMS = {"s": "sequence", "b": "batch", "t": "tokens", "h": "heads", "d": "head dim"}


def dims_of(letters: str) -> str:
    """Return the dims of a format in words, for messages."""
    return ", ".join(_DIMS[letter] for letter in letters)


def checked_format(qkv_format: str, name: str = "qkv_format") -> str:
    """Check a format's name; ``name``: what the caller calls the argument.

    Raises:
        ValueError: it is not one of ``FORMATS``.
    """
    if not is_one_of(qkv_format, FORMATS):
        raise ValueError(f"{name} is {not_among(qkv_format, FORMATS)}")
    return qkv_format


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, qkv_format: str, heads: int, groups: int, dims: tuple[int, int]
) -> None:
    """Check what attention is called with.

    Args:
        heads: of the queries.
        groups: heads of keys and values.
        dims: head dims of keys and of values.

    Raises:
        ValueError: ranks, devices, heads, head dims, batch or key lengths that do not fit.
        TypeError: dtypes.
    """
    rank = 3 if qkv_format == "thd" else 4
    expected = (
        ("query_layer", q, heads, dims[0]),
        ("key_layer", k, groups, dims[0]),
        ("value_layer", v, groups, dims[1]),
    )
    for name, x, count, dim in expected:
        tensor(name, x)
        if x.dim() != rank:
            raise ValueError(
                f"{name} has shape {shape_of(x)}; qkv_format={shown(qkv_format)} takes {rank} dims: "
                f"{dims_of(qkv_format)}"
            )
        if x.shape[-2] != count or x.shape[-1] != dim:
            raise ValueError(f"{name} has shape {shape_of(x)}; its last two dims must be ({count}, {dim})")
        if x.dtype not in HIGH_PRECISION or x.dtype != q.dtype:
            beside = "" if name == "query_layer" else f" and query_layer {q.dtype}"
            raise TypeError(
                f"{name} is {x.dtype}{beside}; cast them: attention takes all three in one of "
                f"{', '.join(map(str, HIGH_PRECISION))}"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and query_layer on {q.device}; move them together")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"key_layer {shape_of(k)} and value_layer {shape_of(v)} must agree in all but the head dim"
        )
    batch = qkv_format.find("b")
    if batch >= 0 and q.shape[batch] != k.shape[batch]:
        raise ValueError(f"query_layer {shape_of(q)} and key_layer {shape_of(k)} must have one batch size")


def sequence_length(x: Tensor, qkv_format: str) -> int:
    """Return the size of the dim of tokens."""
    return x.shape[1] if qkv_format == "bshd" else x.shape[0]


def heads_first(x: Tensor, qkv_format: str) -> Tensor:
    """Return (b, h, s, d), a view; packed tokens are one row."""
    if qkv_format == "bshd":
        return x.transpose(1, 2)
    if qkv_format == "sbhd":
        return x.permute(1, 2, 0, 3)
    return x.transpose(0, 1)[None]


def flattened(out: Tensor, qkv_format: str) -> Tensor:
    """Return the output (b, h, s, d) in a format, heads and head dim in one."""
    if qkv_format == "bshd":
        return out.transpose(1, 2).flatten(2)
    if qkv_format == "sbhd":
        return out.permute(2, 0, 1, 3).flatten(2)
    return out[0].transpose(0, 1).flatten(1)
