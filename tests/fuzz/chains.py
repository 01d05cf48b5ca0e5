"""Quantized tensors: chains of views, copies, casts, edits and moves, beside the same on the decoded tensor."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import torch
from quantizers.catalog import VARIANTS
from torch import Tensor, nn

import narrowcast as nc

from .programs import Difference, Invalid, Program, attempt, compare, normal, refusal

NAMES = tuple(name for name in VARIANTS if "stochastic" not in name)
SIZES = (1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 128, 130)
OPS = (
    "slice",
    "slice",
    "slice",
    "split",
    "split_sizes",
    "chunk",
    "narrow",
    "select",
    "index",
    "view",
    "view2",
    "reshape",
    "flatten",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "expand",
    "as_strided",
    "clone",
    "detach",
    "contiguous",
    "to_dtype",
    "to_same",
    "double",
    "deepcopy",
    "save",
    "parameter",
    "data",
    "cat",
    "mul_",
    "add_",
    "zero_",
    "fill_",
    "copy_",
    "requires_grad_",
    "zeros_like",
    "new_zeros",
    "abs",
    "sum",
    "matmul",
    "unbind",
    "half",
    "cpu",
    "ones_like",
    "setitem",
)


def draw(rng: random.Random) -> Program:
    rank = rng.choice((2, 2, 2, 3))
    return {
        "quantizer": rng.choice(NAMES),
        "seed": rng.randrange(10**6),
        "shape": [rng.choice((1, 2, 3)) for _ in range(rank - 2)] + [rng.choice(SIZES), rng.choice(SIZES)],
        "dtype": rng.choice(("float32", "bfloat16")),
        "usage": rng.choice(("both", "both", "rowwise", "columnwise")),
        "ops": [
            {
                "do": rng.choice(OPS),
                "dim": rng.randrange(-2, 3),
                "a": rng.choice((0, 1, 8, 16, 17, 32, 64)),
                "b": rng.choice((1, 2, 8, 16, 17, 32, 33, 64, 1000)),
            }
            for _ in range(rng.randint(1, 5))
        ],
    }


def apply(t: Any, op: Program) -> Any:
    """One step of the chain, on either tensor."""
    dim, a, b, size = op["dim"] or 0, op["a"] or 0, op["b"] or 0, tuple(t.shape)
    do = op["do"]
    if do == "slice":
        return t[(slice(None),) * (dim % t.dim()) + (slice(a, a + b),)]
    if do in ("split", "chunk", "split_sizes"):
        given: Any = max(b, 1)
        if do == "split_sizes":
            given = [min(b, size[dim]), size[dim] - min(b, size[dim])]
        parts = t.chunk(3, dim) if do == "chunk" else t.split(given, dim)
        return parts[a % len(parts)]
    if do == "narrow":
        return t.narrow(dim, a, b)
    if do == "expand":
        return t.expand(2, *size)
    if do == "as_strided":
        rows = max(size[0] - a, 0) if len(size) == 2 else size[0]
        return t.as_strided((min(rows, b), *size[1:]), t.stride(), a * t.stride(0) if len(size) == 2 else 0)
    if do == "view2":
        return t.view(-1, size[-1], 1) if a % 2 else t.view(-1, size[-1])
    if do == "index":
        return t[torch.arange(0, size[0], 2)]
    if do == "permute":
        return t.permute([*reversed(range(t.dim()))])
    if do == "save":
        file = io.BytesIO()
        torch.save(t, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    return _SIMPLE[do](t, op)


def _setitem(t: Any, op: Program) -> Any:
    t[op["a"] or 0] = 1.0
    return t


_SIMPLE: dict[str, Callable[[Any, Program], Any]] = {
    "select": lambda t, op: t.select(op["dim"] or 0, op["a"] or 0),
    "view": lambda t, op: t.view(t.numel() // t.shape[-1], t.shape[-1]),
    "reshape": lambda t, op: t.reshape(-1, op["b"] or 1),
    "flatten": lambda t, op: t.flatten(),
    "transpose": lambda t, op: t.transpose(0, -1),
    "unsqueeze": lambda t, op: t.unsqueeze(op["dim"] or 0),
    "squeeze": lambda t, op: t.squeeze(),
    "clone": lambda t, op: t.clone(),
    "detach": lambda t, op: t.detach(),
    "contiguous": lambda t, op: t.contiguous(),
    "to_dtype": lambda t, op: t.to(torch.float32),
    "half": lambda t, op: t.bfloat16(),
    "to_same": lambda t, op: t.to("cpu"),
    "cpu": lambda t, op: t.cpu(),
    "double": lambda t, op: t.double(),
    "deepcopy": lambda t, op: copy.deepcopy(t),
    "parameter": lambda t, op: nn.Parameter(t).detach(),
    "data": lambda t, op: t.data,
    "cat": lambda t, op: torch.cat([t, t], op["dim"] or 0),
    "mul_": lambda t, op: t.mul_(0.5),
    "add_": lambda t, op: t.add_(1.0),
    "zero_": lambda t, op: t.zero_(),
    "fill_": lambda t, op: t.fill_(2.0),
    "copy_": lambda t, op: t.copy_(torch.full(tuple(t.shape), 0.5)),
    "setitem": _setitem,
    "requires_grad_": lambda t, op: t.requires_grad_(True).detach(),
    "zeros_like": lambda t, op: torch.zeros_like(t),
    "ones_like": lambda t, op: torch.ones_like(t),
    "new_zeros": lambda t, op: t.new_zeros(3, 2),
    "abs": lambda t, op: t.abs(),
    "sum": lambda t, op: t.sum(op["dim"] or 0),
    "matmul": lambda t, op: t @ t.transpose(-1, -2),
    "unbind": lambda t, op: t.unbind(0)[-1],
}
LONGEST = 2048  # rows of a product with itself, whose size is their square
CASTS = ("to_dtype", "double", "half")
WRITES = ("mul_", "add_", "zero_", "fill_", "copy_", "setitem")


def rows_of(t: Any) -> Tensor:
    return t.dequantize() if isinstance(t, nc.QuantizedTensor) else t


def columns_of(t: Any) -> Tensor | None:
    """What the column-wise codes say, where there are any."""
    if not isinstance(t, nc.QuantizedTensor) or not t._quantizer.get_usages()["columnwise"]:
        return None
    other = t.detach().clone()
    if other._quantizer.get_usages()["rowwise"]:
        other.update_usage(rowwise_usage=False, columnwise_usage=True)
    return other.dequantize()


def run(program: Program) -> dict[str, float]:
    if len(program["shape"]) < 2 or min(program["shape"]) < 1 or program["quantizer"] is None:
        raise Invalid("no matrix")
    quantizer = VARIANTS[program["quantizer"]]
    if program["usage"] not in (None, "both"):
        quantizer = quantizer.with_usage(program["usage"] == "rowwise", program["usage"] == "columnwise")
    dtype = getattr(torch, program["dtype"] or "float32")
    x = normal(program["seed"], *program["shape"], dtype=dtype)
    t, error = attempt(lambda: quantizer.quantize(x))
    if error is not None:
        if refusal(error):
            return {"refused": 1.0}
        raise error
    plain, columns = rows_of(t).clone(), columns_of(t)
    columns = None if columns is None else columns.clone()
    cast = added = False
    least = 1e-30  # of what sums are judged by: their terms may cancel each other
    for op in program["ops"]:
        if op["do"] == "matmul" and plain.dim() > 1 and plain.shape[-2] > LONGEST:
            continue
        expected, theirs = attempt(lambda: apply(plain, op))
        if theirs is not None:
            continue
        before = t
        t, error = attempt(lambda: apply(before, op))
        if error is not None:
            if refusal(error):
                return {"refused": 1.0}
            raise error
        name = op["do"]
        if name in CASTS and isinstance(before, nc.QuantizedTensor):
            expected = expected.clone()  # decoded values are memory of their own, in the same dtype, too
        if isinstance(t, nc.QuantizedTensor):
            if name in WRITES:
                again = t._quantizer.quantize(expected.to(t.dtype))
                expected, columns = rows_of(again), columns_of(again)
            elif columns is not None:
                columns = apply(columns, op)
            found = columns_of(t)
            if found is not None and columns is not None:
                compare(
                    found, columns.to(found.dtype), f"column-wise codes after {name}", 1e-2 if cast else 0.0
                )
            if not t._quantizer.get_usages()["columnwise"]:
                columns = None
        else:
            columns = None
        ours = rows_of(t)
        if not isinstance(ours, Tensor):
            raise Difference(f"{name} returns {type(ours).__name__}")
        cast |= name in CASTS  # codes decode with more digits into a wider dtype
        added |= name in ("sum", "matmul")  # in another order, of other strides
        loose = 1e-2 if cast else 1e-5 if added else 0.0
        if name in ("sum", "matmul"):
            least = apply(plain.abs(), op).double().norm().item()
        compare(ours, expected, f"after {name}", loose, least=max(least, 1e-30))
        plain = expected
    return {}
