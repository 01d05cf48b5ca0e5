"""Two processes share a Transformer layer, heads and feed-forward block, and with it the sequence: they equal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.testing import assert_close

H, FFN, HEADS, LENGTH, BATCH, WORLD = 32, 48, 4, 8, 2, 2
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
CASES: dict[str, dict[str, Any]] = {
    "tensor": {"fuse_qkv_params": True, "num_gqa_groups": 2},
    "sequence": {"sequence_parallel": True, "normalization": "RMSNorm", "activation": "swiglu", "seq_length": LENGTH},
    "decoder": {
        "sequence_parallel": True, "layer_type": "decoder", "fuse_qkv_params": True, "num_gqa_groups": 2,
        "apply_residual_connection_post_layernorm": True,
    },
    "parallel": {"sequence_parallel": True, "parallel_attention_mlp": True, "output_layernorm": False},
    "compiled": {"sequence_parallel": True, "output_layernorm": True, "compiled": True},
}  # fmt: skip


def build(name: str, group: Any = None) -> nc.TransformerLayer:
    options = {key: value for key, value in CASES[name].items() if key != "compiled"}
    if group is None:
        options.pop("sequence_parallel", None)
    else:
        options |= {"tp_group": group, "set_parallel_mode": True}
    return nc.TransformerLayer(
        H, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", init_method=wide,
        output_layer_init_method=wide, **options,
    )  # fmt: skip


def wide(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.2)


def whole(name: str) -> nc.TransformerLayer:
    torch.manual_seed(1)
    layer = build(name)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def share(tensor: Tensor, rank: int, dim: int = 0) -> Tensor:
    return tensor.chunk(WORLD, dim)[rank]


def part(case: str, name: str, value: Tensor, rank: int) -> Tensor:
    """A rank's part of a parameter or of its gradient."""
    last = name.split(".")[-1]
    if "layer_norm_" in last or name.startswith("layernorm.") or name.endswith(("proj.bias", "fc2_bias")):
        return value
    if name.endswith(("proj.weight", "fc2_weight")):
        return share(value, rank, 1)
    if last.startswith("fc1") and CASES[case].get("activation") == "swiglu":
        return torch.cat([share(half, rank) for half in value.chunk(2)])
    return share(value, rank)


def inputs(case: str, rank: int | None = None) -> dict[str, Tensor]:
    """Leaves, a rank's rows where the sequence is shared, and the gradient of the output."""
    names = {"hidden_states": LENGTH, "grad": LENGTH}
    if CASES[case].get("layer_type") == "decoder":
        names["encoder_output"] = LENGTH + 2
    found = {}
    for seed, (name, length) in enumerate(names.items()):
        value = torch.randn(length, BATCH, H, generator=torch.Generator().manual_seed(seed))
        if rank is not None and CASES[case].get("sequence_parallel"):
            value = share(value, rank)
        found[name] = value.clone().requires_grad_(name != "grad")
    return found


def results(layer: nn.Module, given: dict[str, Tensor], compiled: bool) -> dict[str, Tensor]:
    grad = given.pop("grad")
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out = forward(**given)
    out.backward(grad)
    found = {f"d {name}": value.grad for name, value in given.items()}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), **found}


def work(rank: int) -> Any:
    found = {}
    for name, options in CASES.items():
        layer, source = build(name, dist.group.WORLD), whole(name)
        with torch.no_grad():
            for key, parameter in layer.named_parameters():
                parameter.copy_(part(name, key, source.get_parameter(key), rank))
        found[name] = results(layer, inputs(name, rank), "compiled" in options)
        for key, parameter in layer.named_parameters():
            if getattr(
                parameter, "sequence_parallel", False
            ):  # as Transformer Engine, these are left to the user
                dist.all_reduce(found[name][key])
        found[name]["heads"] = torch.tensor(layer.self_attention.num_attention_heads)
    return found


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    ranks = run_ranks(work, tmp_path, WORLD, 240)
    for name, options in CASES.items():
        expected = results(whole(name), inputs(name), False)
        for rank, found in enumerate(ranks):
            assert found[name].pop("heads") == HEADS // WORLD
            assert found[name].keys() == expected.keys()
            for key, value in expected.items():
                if key in ("out", "d hidden_states", "d encoder_output"):
                    value = share(value, rank) if options.get("sequence_parallel") else value
                else:
                    value = part(name, key, value, rank)
                if (
                    value.norm() > 1e-4 * expected["out"].norm()
                ):  # the gradient of a key's bias is rounding alone
                    assert_close(found[name][key], value, "fp32_layer")


def test_a_share_of_another_length_is_told() -> None:
    layer = build("tensor")
    layer.local_length = 4
    with pytest.raises(ValueError, match="seq_length / tp_size = 4 rows"):
        layer(torch.randn(5, BATCH, H))
