"""``StandIn``: in the place of a buffer that FSDP2 copies tensors into to send them, the tensors themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Contents:
    """What FSDP2 would have copied into its buffer; kept as long as FSDP2 keeps the buffer."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def copy_out(self, out: list[Tensor]) -> None:
        """Put what was gathered into FSDP2's tensors, one row for each rank."""
        raise NotImplementedError


class StandIn(Tensor):
    """Has the size of the buffer, and no memory; its views have the same contents."""

    @staticmethod
    def __new__(cls, contents: Contents, size: Any, dtype: torch.dtype, device: Any) -> StandIn:
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)  # type: ignore[attr-defined]

    def __init__(self, contents: Contents, size: Any, dtype: torch.dtype, device: Any) -> None:
        self.contents = contents

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What FSDP2 does to its buffers: view them as a row for each rank, fill them, and copy out of them."""
        fsdp = torch.ops.fsdp
        if func is torch.ops.aten.view.default:
            buffer, (rows, _) = args
            return cls(buffer.contents, (rows, buffer.numel() // rows), buffer.dtype, buffer.device)
        if func is fsdp.chunk_cat.default:
            return kwargs["out"].contents.tensors.extend(args[0])
        if func is fsdp.all_gather_copy_in.default:
            args[1].contents.tensors.extend(args[0])
            return args[1], args[1]
        if func is fsdp.split_with_sizes_copy.default:
            return args[0].contents.copy_out(kwargs["out"])
        raise NotImplementedError(f"{func} of a buffer that tensors are sent without")
