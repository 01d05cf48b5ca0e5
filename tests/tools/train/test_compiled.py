"""The compiled step, with every option, is the eager one; replayed CUDA graphs are the compiled one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from narrowcast_tools.train import trainer
from narrowcast_tools.train.asked import require_graphs
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.data import Corpus
from narrowcast_tools.train.errors import SettingsError, TrainingError
from narrowcast_tools.train.loop import Run
from narrowcast_tools.train.progress import Progress

EVERYTHING = {"recompute": True, "accumulate": 2, "keep_bf16": "blocks.0.attention"}


@pytest.mark.parametrize("by_block", [False, True])
def test_every_option_is_in_one_graph_with_the_same_bits(
    by_block: bool,
    config: TrainConfig,
    corpus: Corpus,
    progress: Progress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(config, recipe="delayed", steps=3, **EVERYTHING)
    if by_block:
        config = replace(config, keep_bf16="blocks.*.attention", model=replace(config.model, layers=2))
    eager = Run(config, corpus, progress, folder=None).train().history
    monkeypatch.setattr(trainer, "BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    compiled = replace(config, compile=True, by_block=by_block)
    assert Run(compiled, corpus, progress, folder=None).train().history == eager
    assert counters["stats"]["unique_graphs"] == 2, (
        "one that trains and one that evaluates, whatever the depth"
    )


def test_a_failure_of_the_compiler_is_a_line(
    config: TrainConfig, corpus: Corpus, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 460 lines of traceback."""

    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise RuntimeError(
            "C++ compile error\n\nCommand:\ng++ main.cpp\n\nOutput:\nmain.cpp:3: error: no header"
        )

    monkeypatch.setattr(trainer, "BACKEND", broken)
    config = replace(config, compile=True, steps=1)
    torch.compiler.reset()
    with pytest.raises(TrainingError) as failed:
        Run(config, corpus, progress, folder=None).train()
    told = str(failed.value)
    assert told.startswith("--compile failed: RuntimeError: C++ compile error main.cpp:3: error: no header;")
    assert told.endswith("; leave --compile out, or set TORCHDYNAMO_VERBOSE=1 to see the traceback")
    assert len(told) <= 300 and "\n" not in told
    torch.compiler.reset()
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    with pytest.raises(BackendCompilerFailed):
        Run(config, corpus, progress, folder=None).train()


def test_graphs_replay_the_whole_step() -> None:
    with pytest.raises(SettingsError, match=r"--by-block compiles parts; leave one of them out"):
        require_graphs("cuda", compiled=True, by_block=True)


def test_graphs_need_a_gpu_and_the_compiler() -> None:
    with pytest.raises(
        SettingsError, match=r"--graphs replays CUDA graphs, and --device is cpu; leave --graphs out"
    ):
        require_graphs("cpu", compiled=True)
    with pytest.raises(SettingsError, match=r"--compile is not given; add --compile"):
        require_graphs("cuda", compiled=False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """PyTorch's gradients of embeddings and attention add in any order otherwise: two bf16 runs differed, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "every option"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block"])
def test_replayed_graphs_are_the_compiled_step(
    recipe: str, options: dict, config: TrainConfig, corpus: Corpus, progress: Progress, deterministic: None
) -> None:
    shape = ModelConfig(dim=128, layers=2, heads=4, kv_heads=2, hidden=256)
    # parts of a batch share the codes that FusedAdam writes, which it does not with graphs
    if recipe == "delayed":
        options = {**options, "accumulate": 1}
    config = replace(config, recipe=recipe, device="cuda", compile=True, steps=12, model=shape, **options)
    histories = []
    for graphs in (False, True):
        torch.compiler.reset()
        histories.append(Run(replace(config, graphs=graphs), corpus, progress, folder=None).train().history)
    assert histories[0] == histories[1]
