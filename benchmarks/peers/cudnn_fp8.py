"""cuDNN's attention of FP8 operands through its Python front end, ``nvidia-cudnn-frontend``, where it is installed.

Only the kernels: operands are codes already, results stay codes, and every scale is 1, which is right for operands of
unit variance. On Hopper cuDNN writes FP8 only, and its backward takes a head dim of 128 only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

cudnn: Any = None
with contextlib.suppress(ImportError):
    import cudnn

AVAILABLE = cudnn is not None
BACKWARD_DIM = 128
CODES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_SCALARS = {
    "forward": ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"),
    "backward": (
        *(f"descale_{name}" for name in ("q", "k", "v", "o", "dO", "s", "dP")),
        *(f"scale_{name}" for name in ("s", "dQ", "dK", "dV", "dP")),
    ),
}
_RESULTS = {
    "forward": ("o", "stats", "amax_s", "amax_o"),
    "backward": ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"),
}


def tensors_of(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return what both passes read and write, of bf16 tensors (b, s, h, d)."""
    codes = {"q": q.to(CODES), "k": k.to(CODES), "v": v.to(CODES), "dO": grad.to(GRADIENTS)}
    written = {"o": torch.empty_like(codes["q"])}
    written |= {
        f"d{name.upper()}": torch.empty_like(codes[name], dtype=GRADIENTS) for name in ("q", "k", "v")
    }
    heads_first = {name: x.transpose(1, 2) for name, x in {**codes, **written}.items()}
    b, h, s, _ = heads_first["q"].shape
    return {**heads_first, "stats": torch.empty(b, h, s, 1, device=q.device)}


def built(which: str, tensors: dict[str, Tensor]) -> Callable[[], object]:
    """Return causal attention's "forward" or "backward", which reads and writes the tensors."""
    types = cudnn.data_type
    kinds = {torch.float32: types.FLOAT, CODES: types.FP8_E4M3, GRADIENTS: types.FP8_E5M2}
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )
    read = ("q", "k", "v") if which == "forward" else ("q", "k", "v", "o", "dO", "stats")
    of_name = {**tensors, **{name: torch.ones(1, 1, 1, 1, device="cuda") for name in _SCALARS[which]}}
    given = {
        name: graph.tensor(
            name=name,
            dim=list(of_name[name].shape),
            stride=list(of_name[name].stride()),
            data_type=kinds[of_name[name].dtype],
        )
        for name in (*read, *_SCALARS[which])
    }
    options = {"attn_scale": tensors["q"].shape[-1] ** -0.5, "use_causal_mask": True}
    if which == "forward":
        results = graph.sdpa_fp8(**given, generate_stats=True, **options)
    else:
        results = graph.sdpa_fp8_backward(**given, **options)
    operands = {given[name]: of_name[name] for name in given}
    for name, result in zip(_RESULTS[which], results):
        out = tensors.get(name, torch.empty(1, 1, 1, 1, device="cuda"))
        result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
        result.set_data_type(kinds[out.dtype])
        operands[result] = out
    graph.build([cudnn.heur_mode.A])
    space = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    return lambda: graph.execute(operands, space, handle=handle)
