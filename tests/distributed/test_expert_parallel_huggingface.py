"""Mixtures of Transformers, experts over two ranks and the rest under FSDP2, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.testing import assert_close

pytest.importorskip("transformers", reason="needs transformers: pip install 'narrowcast[hf]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'narrowcast[hf]'")
from convert.test_huggingface import make

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

WORLD, SECONDS = 2, 400
FAMILIES = ("mixtral", "qwen3-moe", "deepseek", "gpt-oss", "llama4")
WORDS = torch.randint(0, 96, (WORLD, 12), generator=torch.Generator().manual_seed(5))


def model_of(name: str) -> Any:
    return nc.convert(make(name), "mxfp8", only="**.experts")


def step(model: Any, words: Tensor) -> dict[str, Tensor]:
    """Loss and gradients, whole."""
    loss = model(input_ids=words, labels=words).loss
    loss.backward()
    grads: dict[str, Any] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in grads.items()}
    return {"loss": loss.detach(), **{name: one.clone() for name, one in whole.items()}}


def work(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, results = init_device_mesh("cpu", (WORLD,)), {}
    for name in FAMILIES:
        model = model_of(name)
        experts = nc.distributed.expert_parallel(model, mesh, quantizer=None, align_size=32)
        layers: list[nn.Module] = [one for one in model.modules() if hasattr(one, "exchange_tokens")]
        assert layers
        for layer in layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, ignored_params=experts)
        fully_shard(model, mesh=mesh, ignored_params=experts)
        names = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        results[name] = step(model, WORDS[rank : rank + 1]), names
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_process(ranks: list[Any], name: str) -> None:
    model = model_of(name)
    assert ranks[0][name][1] == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    expected = step(model, WORDS)
    losses = torch.stack([rank[name][0]["loss"] for rank in ranks])
    assert_close(losses.mean(), expected.pop("loss"), "fp8_flips")
    assert expected.keys() == ranks[0][name][0].keys() - {"loss"}
    for key, grad in expected.items():
        if grad.norm() > 1e-6:  # of a key's bias it is zero but for rounding
            assert_close(ranks[0][name][0][key], grad, "fp8_layer")
