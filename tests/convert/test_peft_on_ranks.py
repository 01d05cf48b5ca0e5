"""PEFT's adapters of stored experts on two ranks: the bits of one process, or an error before anything changed."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks_checks import of_all, run_checks
from torch import Tensor, nn

import narrowcast as nc

pytest.importorskip("transformers", reason="needs transformers: pip install 'narrowcast[hf]'")
pytest.importorskip("peft", reason="needs peft: pip install 'narrowcast[peft]'")
from .test_peft import EXPERTS, make_mixture, peft

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

CASES: dict[str, tuple[str, str, bool]] = {
    "stored, block": ("stored", "block", False),
    "stored, current, checkpointing": ("stored", "current", True),
    "nvfp4, current": ("nvfp4", "current", False),
}
"""How weights are stored, the recipe, and whether blocks are checkpoints."""
REFUSED = {
    "fully_shard": r"FSDP cannot shard a GroupedTensor: .*; convert experts with weights='plain'",
    "shard": r"FSDP cannot shard a GroupedTensor: .*; convert experts with weights='plain'",
    "expert_parallel": r"the experts of 'base_model\.model\.model\.layers\.0\.mlp\.experts\..*' are stored as codes",
}


def adapted(weights: Any, recipe: str) -> Any:
    base = nc.convert(make_mixture(128), recipe, weights=weights)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS)
    return peft.get_peft_model(base, lora)


def trained(case: str, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return mean losses, and adapters after three steps, of halves of a batch: a rank's, or both one by one."""
    weights, recipe, checkpoints = CASES[case]
    model = adapted(weights, recipe)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    halves = torch.randint(96, (2, 2, 12), generator=torch.Generator().manual_seed(2))
    own = halves[dist.get_rank() :][:1] if ranks > 1 else halves
    optimizer = nc.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    losses = []
    for _ in range(3):
        found = [parallel.train()(input_ids=half, labels=half).loss / len(own) for half in own]
        for loss in found:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).detach().sum())
    return losses, [one.detach() for one in model.parameters() if one.requires_grad]


def refuses(way: str) -> list[str]:
    """Return what a rank is told of sharding stored experts with adapters."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    ways: dict[str, Any] = {
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "shard": lambda model: nc.distributed.shard(model, mesh),
        "expert_parallel": lambda model: nc.distributed.expert_parallel(model, mesh),
    }
    try:
        ways[way](adapted("stored", "current"))
    except (RuntimeError, ValueError) as error:
        return [str(error)]
    return [""]


def checks(folder: str) -> dict[str, Any]:
    return {
        **{case: functools.partial(trained, case, 2) for case in CASES},
        **{way: functools.partial(refuses, way) for way in REFUSED},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("case", CASES)
def test_data_parallel_trains_as_one_process(results: list[dict[str, Any]], case: str) -> None:
    (first, adapters), (second, others) = of_all(results, case)
    losses, expected = trained(case, 1)
    assert all(map(torch.equal, [(a + b) / 2 for a, b in zip(first, second, strict=True)], losses))
    assert all(map(torch.equal, adapters, others)) and all(map(torch.equal, adapters, expected))
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("way", REFUSED)
def test_stored_experts_are_not_sharded(results: list[dict[str, Any]], way: str) -> None:
    for (said,) in of_all(results, way):
        assert re.match(REFUSED[way], said)
