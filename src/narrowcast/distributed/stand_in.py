"""``StandIn``: in the place of a buffer that FSDP2 copies tensors into to send them, the tensors themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..upstream.fsdp import BUFFER_OPERATORS, unknown_operator
from ..upstream.tensors import make_wrapper, no_torch_function, schema_of


class Contents:
    """The tensors that FSDP2 would have copied into its buffer; kept as long as FSDP2 keeps the buffer."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def copy_out(self, out: list[Tensor]) -> None:
        """Put what was gathered into FSDP2's tensors, one row for each rank."""
        raise NotImplementedError


class StandIn(Tensor):
    """Has the size of the buffer, and no memory; its views have the same contents."""

    @staticmethod
    def __new__(cls, contents: Contents, size: Any, dtype: torch.dtype, device: Any) -> StandIn:
        return make_wrapper(cls, size, dtype=dtype, device=device)

    def __init__(self, contents: Contents, size: Any, dtype: torch.dtype, device: Any) -> None:
        self.contents = contents

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what FSDP2 does to its buffers: view them as a row per rank, fill them, and copy out of them."""
        if func is torch.ops.aten.view.default:
            buffer, (rows, _) = args
            return cls(buffer.contents, (rows, buffer.numel() // rows), buffer.dtype, buffer.device)
        deed = BUFFER_OPERATORS.get(func.name())
        if deed == "put gradients in":
            return _argument(func, args, kwargs, "out").contents.tensors.extend(
                _argument(func, args, kwargs, "tensors")
            )
        if deed == "put shards in":
            output = _argument(func, args, kwargs, "all_gather_output")
            output.contents.tensors.extend(_argument(func, args, kwargs, "all_gather_inputs"))
            return output, output
        if deed == "take weights out":
            buffer = _argument(func, args, kwargs, "all_gather_output")
            return buffer.contents.copy_out(_argument(func, args, kwargs, "out"))
        raise unknown_operator(func)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an operator's argument by its name.

    Raises:
        UpstreamError: the operator has none of this name.
    """
    if name in (kwargs or {}):
        return kwargs[name]
    position = next((at for at, one in enumerate(schema_of(func).arguments) if one.name == name), len(args))
    if position >= len(args):
        raise unknown_operator(func)
    return args[position]
