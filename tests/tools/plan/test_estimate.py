"""The model of a step: near what was measured, its parts add up, and what cannot be is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from narrowcast_tools import cli
from narrowcast_tools.hardware import RESERVE
from narrowcast_tools.plan import GPUS, MODELS, OPTIMIZERS, Layout, estimate, find_model, held, plan
from narrowcast_tools.plan.layout import default_batch_size

ROOT = Path(__file__).resolve().parents[3]


def _tables(name: str) -> ModuleType:
    """A script of ``docs``; ``scaling_tables`` has the steps that ran."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    tables = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tables
    spec.loader.exec_module(tables)
    return tables


TABLES, FINE_TUNE = _tables("scaling_tables"), _tables("fine_tune_tables")


@pytest.mark.parametrize("case", TABLES.CASES, ids=lambda case: f"{case.name}, {case.recipe}")
def test_predictions_stay_within_the_stated_error(case) -> None:
    assert abs(case.predicted() / case.reported - 1) <= case.error
    if case.memory:
        assert abs(case.estimate().total_memory / 2**30 / case.memory - 1) <= 0.1


@pytest.mark.parametrize(
    ("name", "billions"), [("8b", 8.03), ("70b", 70.6), ("405b", 405.9), ("671b", 671.0)]
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.002)


CONFIGS = {
    "8b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama"},
    "671b": {"num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
             "num_key_value_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512, "q_lora_rank": 1536,
             "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
             "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
             "first_k_dense_replace": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_says_the_shape(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[name]))
    for path in (file, tmp_path):
        assert find_model(str(path)) == replace(MODELS[name], name=tmp_path.name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for relative in ("config.json", "./config.json", ".", "below/../config.json"):
        assert find_model(relative).name == CONFIGS[name].get("model_type", "config.json"), relative
    (tmp_path / "own.json").write_text(json.dumps({"text_config": CONFIGS[name]}))
    assert find_model(str(tmp_path / "own.json")) == replace(MODELS[name], name="own")


def test_a_head_that_is_the_embedding_counts_once(tmp_path: Path) -> None:
    """Llama 3.2 1B: 1.236 billion parameters."""
    sizes = {**CONFIGS["8b"], "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192}
    sizes |= {"num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert find_model(str(tmp_path)).parameters / 1e9 == pytest.approx(1.236, rel=0.002)


# Parameters in billions, and those that a token meets: of the model cards.
MIXTURES = {
    "Qwen3-30B-A3B": (30.5, 3.3, 48, 2048, 6144, 32, 4, 151936, {"head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "Mixtral-8x7B": (46.7, 12.9, 32, 4096, 14336, 32, 8, 32000, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Llama-4-Scout": (109.0, 17.0, 48, 5120, 8192, 40, 8, 202048, {"head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1,
        "model_type": "llama4_text"}),
}  # fmt: skip
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@pytest.mark.parametrize("name", MIXTURES)
def test_parameters_of_a_configured_mixture_are_the_published_ones(name: str, tmp_path: Path) -> None:
    whole, active, *sizes, more = MIXTURES[name]
    (tmp_path / "config.json").write_text(json.dumps({**dict(zip(SIZES, sizes)), **more}))
    model = find_model(str(tmp_path))
    assert model.parameters / 1e9 == pytest.approx(whole, rel=0.015)
    met = model.layers * model.active_layer_weights + 2 * model.dim * model.vocabulary
    assert met / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"which cannot be read \(No such file or directory\); give a model's config\.json"),
        ("[1]", r"which cannot be read \(no configuration: .*\); give a model's"),
        ("{", r"which cannot be read \(no configuration: .*\); give a model's"),
        ('{"n_embd": 768}', r"has no num_hidden_layers; give the config\.json of a model like Llama"),
    ],
)
def test_what_says_no_shape_is_refused(text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"--model is .*, {told}|--model is .*, which {told}"):
        plan(str(tmp_path / "config.json"), 8)
    with pytest.raises(
        ValueError,
        match=r"--model is '13b'; the nearest: '8b'; use one of 8b, .* or the path of a model's config",
    ):
        plan("13b", 8)


def test_active_parameters_of_a_mixture() -> None:
    model = MODELS["671b"]
    active = model.layers * model.active_layer_weights + 2 * model.dim * model.vocabulary
    assert active / 1e9 == pytest.approx(37.6, abs=0.5)


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_all_ranks_are_the_model(name: str) -> None:
    """Memory adds up: the shards of every rank are 16 bytes of each weight, whatever the layout."""
    layouts = [Layout(64, 2**22), Layout(64, 2**22, tp=8)]
    if MODELS[name].experts:
        layouts.append(Layout(64, 2**22, ep=8))
    for layout in layouts:
        memory = estimate(MODELS[name], layout, "bf16", GPUS["h200"]).memory
        held = memory["parameter shards"] + memory["gradient shards"] + memory["optimizer state"]
        assert 64 * held == pytest.approx(16 * MODELS[name].parameters)


def test_totals_are_the_sums_of_their_parts() -> None:
    result = plan("70b", 256)
    told = result.as_json()
    assert told["memory_total"] == pytest.approx(sum(told["memory"].values())) == result.total_memory
    assert told["step"] == pytest.approx(sum(told["seconds"].values()))
    tokens = result.tokens_per_second * result.step * 256
    assert tokens == pytest.approx(16 * 2**20)
    assert result.total_memory <= RESERVE * GPUS["h200"].memory


def test_an_fp8_gather_is_half_the_bytes_and_recomputing_saves_memory() -> None:
    model = replace(MODELS["8b"], vocabulary=1)
    layout = Layout(64, 2**22)
    plain, gathered, again = (
        estimate(model, changed, "current", GPUS["h200"])
        for changed in (layout, replace(layout, fp8_gather=True), replace(layout, recompute=True))
    )
    assert gathered.wire["FSDP all-gather"] == pytest.approx(plain.wire["FSDP all-gather"] / 2, rel=1e-3)
    assert gathered.wire["FSDP reduce-scatter"] == plain.wire["FSDP reduce-scatter"]
    assert again.memory["activations"] < 0.2 * plain.memory["activations"]
    assert again.seconds["GEMMs"] > 1.2 * plain.seconds["GEMMs"]


def test_the_all_gather_by_hand() -> None:
    """Two gathers a microbatch of 7/8 of all weights in bf16."""
    model = MODELS["8b"]
    wire = estimate(model, Layout(8, 8 * 8192), "bf16", GPUS["h200"]).wire
    assert wire["FSDP all-gather"] == pytest.approx(2 * 2 * 7 / 8 * model.parameters)
    assert wire["FSDP reduce-scatter"] == pytest.approx(2 * 7 / 8 * model.parameters)


@pytest.mark.parametrize(
    ("changes", "size"),
    [({}, 2), ({"reduced": 4.0}, 4), ({"pp": 8, "stages": 1}, 4), ({"pp": 8, "batch": 2 * 8192}, 2)],
    ids=["bf16", "FSDP2", "pipeline", "pipeline of one microbatch"],
)
def test_gradients_travel_as_they_are_when_they_are_sent(changes: dict, size: int) -> None:
    """In bf16, unless FSDP2 casts them or microbatches of a pipeline have summed them in fp32; whole by hand."""
    model = replace(MODELS["8b"], vocabulary=0)
    layout = replace(Layout(16, 16 * 8192), **changes)
    wire = estimate(model, layout, "bf16", GPUS["h200"]).wire
    ranks = 16 // layout.pp
    assert wire["FSDP reduce-scatter"] == pytest.approx(
        size * (ranks - 1) / ranks * model.parameters / layout.pp
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model 7b", "--model is '7b'; the nearest: '8b'; use one of 8b, 70b, 405b, 671b"),
        ("--model 70x", "--model is '70x'; the nearest: '70b'; use one of 8b, 70b, 405b, 671b"),
        ("--model 13b", "--model is '13b'; the nearest: '8b'; use one of 8b, 70b, 405b, 671b"),
        (
            "--recipe mxfp8",
            "--recipe is 'mxfp8', for which these GPUs have no measured rates; use one of bf16",
        ),
        ("--gpu b200", "--gpu is 'b200'; use one of h100, h200 or h800"),
        ("--gpus 0", "--gpus is 0; it must be at least 1"),
        ("--model 671b --gpus 1", "the experts of 671b are split over 8 GPUs or more: use a multiple of 8"),
        ("--seq-len 0", "--seq-len is 0; it must be at least 1"),
        ("--pp-size -1", "--pp-size is -1; use 1 or more, or leave it out"),
        (
            "--gpus 12 --tp-size 5",
            "narrowcast: --tp-size is 5; it must divide --gpus 12 and the 32 heads; use 1, 2 or 4\n",
        ),
        (
            "--gpus 64 --tp-size 16",
            "--tp-size is 16; it must divide --gpus 64 and the 32 heads; use 1, 2, 4 or 8\n",
        ),
        (
            "--gpus 8 --pp-size 3",
            "narrowcast: --pp-size 3 does not divide --gpus 8; use sizes whose product does",
        ),
        (
            "--gpus 32 --tp-size 8 --pp-size 8",
            "--tp-size 8 x --pp-size 8 does not divide --gpus 32; use sizes whose product",
        ),
        (
            "--gpus 8 --ep-size 8",
            "narrowcast: 8b has no experts; leave --ep-size out\n",
        ),
        (
            "--model 671b --gpus 16 --ep-size 7",
            "--ep-size is 7; it must divide the 256 experts and the 16 ranks of FSDP; use 1, 2, 4, 8 or 16\n",
        ),
        (
            "--gpus 64 --pp-size 64",
            "--pp-size is 64 x 1 stages, for 32 layers; use 1, 2, 4, 8, 16 or 32\n",
        ),
        (
            "--recipe curent",
            "--recipe is 'curent'; the nearest: 'current'; use one of bf16, delayed, current or",
        ),
        (
            "--recipe fp8",
            "--recipe is 'fp8'; for FP8 use 'current'; use one of bf16, delayed, current or block",
        ),
        (
            "--recipe bf16 --saved-activations fp8",
            "need an FP8 recipe; leave --saved-activations out, or use --recipe current\n",
        ),
        (
            "--gpus 8 --step-in-backward",
            "one GPU and one microbatch; use --gpus 1 --batch-size 1, or leave --step-in-backward out\n",
        ),
        (
            "--gpus 4096 --batch-size 1",
            "--batch-size is 1; no such layout of --gpus 4,096 divides it; use --batch-size 32, or another",
        ),
        (
            "--gpus 100000",
            "is 100,000; no such layout divides its default --batch-size 2,048; use --batch-size 3125, or another",
        ),
        (
            "--gpus 24 --batch-size 7",
            "no such layout of --gpus 24 divides it; use --batch-size 6 or 9, or another multiple of 3\n",
        ),
        (
            "--gpus 8 --batch-size 7 --tp-size 1 --pp-size 1",
            "--batch-size is 7; no such layout of --gpus 8 divides it; use --batch-size 8, or another multiple of 8\n",
        ),
        ("--gpus 8 --batch-size 0", "--batch-size is 0; it must be at least 1"),
        (
            "--model 405b --gpus 8",
            "405b does not fit 8 h200 GPUs: the smallest layout tried (FSDP 1 x TP 8",
        ),
        (
            "--model 405b --gpus 16",
            " GiB that a GPU can use; use --gpus 64\n",
        ),
        (
            "--model 405b --gpus 16 --tp-size 8 --no-recompute --recipe bf16 --optimizer fused-int8",
            " GiB that a GPU can use; use --gpus 64\n",
        ),
        ("--gpus 1", " GiB that a GPU can use; use --gpus 2, --optimizer fused-int8 or --seq-len 4096\n"),
        (
            "--gpus 1 --optimizer fused-int8 --no-recompute --seq-len 16384",
            "can use; leave --no-recompute out or use --gpus 2, --saved-activations fp8 or --seq-len 8192\n",
        ),
        (
            "--model 70b --gpus 1 --seq-len 100000000",
            "can use; no other option alone suffices, nor does --gpus up to 4,096\n",
        ),
    ],
)
def test_what_cannot_be_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", *words.split()]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("gpus", "seq_len", "sequences"),
    [(8, 8192, 2**7), (256, 8192, 2**11), (8, 2**20, 2**3), (4096, 8192, 2**11), (3000, 8192, 1500)],
)
def test_the_default_step_is_one_that_is_run(gpus: int, seq_len: int, sequences: int) -> None:
    assert default_batch_size(gpus, seq_len) == sequences


def test_without_options_a_step_takes_seconds(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"] == "current" and 1 < told["step"] < 30


@pytest.mark.parametrize(
    ("gpus", "sequences"), [(8, 1), (8, 7), (8, 12), (6, 9), (24, 21), (32, 100), (32, 64)]
)
def test_a_batch_is_trained_whole(gpus: int, sequences: int, capsys: pytest.CaptureFixture) -> None:
    """No layout leaves sequences out, and the speed is that of the tokens that the command names."""
    result = plan("8b", gpus, batch_size=sequences, optimizer="fused-int8")
    layout = result.layout
    assert layout.micro_batches * layout.micro_batch * layout.fsdp == sequences
    assert result.tokens_per_second * result.step * gpus == pytest.approx(sequences * 8192)
    words = f"plan --gpus {gpus} --batch-size {sequences} --optimizer fused-int8"
    assert cli.main(words.split()) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"a step of {sequences * 8192:,} tokens" in told
    uneven = f"--batch-size {sequences} does not divide over {gpus} GPUs" in told
    assert uneven == bool(sequences % gpus and gpus % sequences)


def test_an_uneven_layout_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"57344 tokens do not divide into microbatches of 1 x 8192 for each of 4"
    ):
        estimate(MODELS["8b"], Layout(8, 7 * 8192, tp=2), "bf16", GPUS["h200"])


def test_an_fp8_gather_needs_an_fp8_recipe() -> None:
    with pytest.raises(ValueError, match="an FP8 gather needs an FP8 recipe"):
        plan("8b", 8, "bf16", fp8_gather=True)


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"needs [\d,.]+ GiB more than the 127.9 GiB that a GPU can use"):
        plan("671b", 64)


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture) -> None:
    words = ["plan", "--model", "70b", "--gpus", "256", "--recipe", "block"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(" ".join(lines).split())
    for part in (
        "70b in block on 256 h200 GPUs: ",
        "optimizer state ",
        "GB a step: TP ",
        "waiting for the pipeline ",
    ):
        assert part in shown
    assert len(lines) <= 16, "an answer, not a report"
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"]["gpus"] == 256 and told["step"] > 0 and told["gpu"] == "h200"


def test_one_gpu_receives_nothing(capsys: pytest.CaptureFixture) -> None:
    words = "plan --gpus 1 --optimizer fused-stochastic --no-recompute --step-in-backward"
    assert cli.main(words.split()) == 0
    told = capsys.readouterr().out
    assert "; 1 microbatch of 1 x 8192 tokens" in " ".join(told.split())
    assert "received" not in told and "gather" not in told
    assert cli.main(["plan", "--gpus", "8"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "microbatches of" in told and "received GB a step" in told and "FP8 gather" in told


def test_the_command_says_how_far_off_it_was(capsys: pytest.CaptureFixture) -> None:
    told = {}
    for words in ("--gpus 2 --optimizer fused-int8", "--gpus 8", "--model 671b --gpus 512"):
        assert cli.main(["plan", *words.split()]) == 0
        told[words.split()[1]] = " ".join(capsys.readouterr().out.split())
    table = re.findall(
        r"^\| (.*?) \|.*\| ([+-]\d+)% \|", (ROOT / "docs" / "scaling.md").read_text(), re.MULTILINE
    )
    errors = [abs(int(error)) for _, error in table]
    many = next(at for at, (name, _) in enumerate(table) if name.startswith("Llama"))
    experts = next(at for at, (name, _) in enumerate(table) if name.startswith("DeepSeek"))
    assert (
        f"estimate: plans of one and two GPUs were within {max(errors[:many])}% of measured steps"
        in told["2"]
    )
    assert f"estimate: expect 5 to {max(errors[many:experts])}% less speed" in told["8"]
    assert (
        f"expect a quarter less speed, or lower; the plan of a report from 2,048 GPUs was {errors[experts]}% too fast"
        in told["671b"]
    )
    assert all(text.count("an estimate") == 1 and "docs/" not in text for text in told.values())


def test_words_of_the_tables_are_explained_where_they_stand(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--model", "70b", "--gpus", "256"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "8 pipeline stages per rank" in told and "waiting for the pipeline 0.6" in told
    assert not any(word in told for word in ("exposed", "bubble", "shards", "full gradients"))
    assert cli.main(["plan", "--gpus", "8", "--recipe", "bf16"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "FP8" not in told and "pipeline" not in told


def test_parameters_and_gradients_are_named_after_the_layers_that_are_held(
    capsys: pytest.CaptureFixture,
) -> None:
    """A rank of a pipeline holds those of all its layers, which were listed as "a whole layer's gradients"."""
    told = {}
    for size in ("1", "8"):
        assert cli.main(["plan", "--model", "70b", "--gpus", "256", "--pp-size", size]) == 0
        told[size] = " ".join(capsys.readouterr().out.split())
    assert "two layers' gathered parameters " in told["1"] and "one layer's unsharded gradients " in told["1"]
    assert "all layers' gathered parameters " in told["8"] and "all layers' unsharded gradients " in told["8"]


def test_the_memory_that_a_plan_may_use_is_told_apart_from_the_gpus(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--gpus", "8"]) == 0
    assert "GiB of 127.9 usable per GPU " in " ".join(capsys.readouterr().out.split())


def test_a_plan_that_leaves_little_memory_says_so(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "fits" with 0.2 GiB to spare, and no more."""
    total = plan("8b", 8).total_memory / GPUS["h200"].memory
    told = []
    for share in (0.98, 0.96):
        monkeypatch.setattr("narrowcast_tools.plan.command.RESERVE", total / share)
        assert cli.main(["plan", "--gpus", "8"]) == 0
        told.append("within 3% of what is usable" in " ".join(capsys.readouterr().out.split()))
    assert told == [True, False]
    assert cli.main(["plan", "--model", "70b", "--gpus", "256"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "and may not suffice; --recompute needs 78.3 GiB, at 0.81 times the speed" in out
    assert cli.main(["plan", "--model", "70b", "--gpus", "256", "--no-recompute"]) == 0
    assert "and may not suffice; more --gpus make room" in " ".join(capsys.readouterr().out.split())


def test_an_empty_model_is_named_as_one(capsys: pytest.CaptureFixture) -> None:
    """It was the current folder, whose config.json was missed."""
    assert cli.main(["plan", "--model", ""]) == 2
    assert "--model is ''; use one of 8b, 70b" in capsys.readouterr().err


def test_a_plan_takes_one_recipe(capsys: pytest.CaptureFixture) -> None:
    """It named the nearest recipe."""
    assert cli.main(["plan", "--recipe", "bf16,current"]) == 2
    assert "--recipe is 'bf16,current', and a plan takes one recipe; give one" in capsys.readouterr().err


def test_a_file_that_is_no_configuration_is_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It was taken for the name of a model."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(9))
    assert cli.main(["plan", "--model", str(path)]) == 2
    told = capsys.readouterr().err
    assert f"--model is {path}, which cannot be read (no configuration: " in told
    assert told.endswith("; give a model's config.json\n")


def test_small_sizes_and_times_are_no_zeros(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**shape, "vocab_size": 256, "model_type": "llama"}))
    assert cli.main(["plan", "--model", str(path), "--gpus", "8", "--seq-len", "64"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for part in (
        r" [\d.]+ MiB of 127.9 usable per GPU ",
        r"; [\d.]+ ms a step of",
        "memory MiB: activations ",
        "received MB a step: ",
    ):
        assert re.search(part, told), part


def test_the_layout_in_bf16_is_told(capsys: pytest.CaptureFixture) -> None:
    """The ratio compares the best layout of each, which may differ."""
    assert cli.main(["plan", "--model", "70b", "--gpus", "64"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "layout FSDP 4 x TP 2 x PP 8; " in told and "bf16 layout FSDP 32 x TP 2 x PP 1; " in told
    assert cli.main(["plan", "--model", "70b", "--gpus", "64", "--recipe", "bf16"]) == 0
    assert "bf16 layout" not in capsys.readouterr().out


def test_the_command_says_what_bf16_does_on_the_same_gpus(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--gpus", "8"]) == 0
    told = re.search(r"per GPU, ([\d.]+) times bf16's ([\d,]+);", " ".join(capsys.readouterr().out.split()))
    assert told is not None
    plain, own = plan("8b", 8, "bf16").tokens_per_second, plan("8b", 8).tokens_per_second
    assert told.groups() == (f"{own / plain:.2f}", f"{plain:,.0f}")
    assert cli.main(["plan", "--gpus", "8", "--recipe", "bf16"]) == 0
    assert "times bf16's" not in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "told"), [(12, True), (16, False), (4, False)])
def test_a_host_in_part_empty_is_told(gpus: int, told: bool, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--gpus", str(gpus)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("Use --gpus 8 or 16." in shown) == told


def test_the_page_shows_what_the_model_says() -> None:
    assert TABLES.page() == TABLES.PAGE.read_text(), "run python docs/scaling_tables.py"


def test_the_page_of_one_gpu_has_what_the_planner_says() -> None:
    assert FINE_TUNE.page() == FINE_TUNE.PAGE.read_text(), "run python docs/fine_tune_tables.py"
    assert "8B, 8,192 tokens" in FINE_TUNE.largest()


def test_options_of_memory() -> None:
    """Bytes of the 8B shape by hand: 8.125 of a weight; a saved element in codes is 33/32 of a byte."""
    model, tokens = MODELS["8b"], 4096
    plain = Layout(1, 2 * tokens, tokens, state=OPTIMIZERS["fused-int8"])
    small = replace(plain, saved_fp8=True, chunked_loss=True)
    before, after = held(model, plain, "current"), held(model, small, "current")
    state = sum(after[name] for name in ("parameter shards", "gradient shards", "optimizer state"))
    assert state == 8.125 * model.parameters
    own = 2 * 4096 + 2 * 14336
    assert before["activations"] - after["activations"] == 32 * tokens * own * (2 - 33 / 32)
    logits = "logits, or a layer's gradients"
    assert before[logits] == 6 * tokens * 128256 and after[logits] < before[logits] / 4
    with pytest.raises(ValueError, match="saved activations in FP8 need an FP8 recipe"):
        held(model, small, "bf16")
    result = plan(
        "8b", 1, "current", "h100", optimizer="fused-int8", saved_activations="fp8", chunked_loss=True
    )
    assert result.layout.recompute and result.layout.saved_fp8 and result.total_memory < RESERVE * 78 * 2**30
    inside = replace(small, batch=tokens, step_in_backward=True)
    parts = held(model, inside, "current")
    assert parts["gradient shards"] == 2 * 4096 * 128256 and "not at the same time" not in parts
    with pytest.raises(ValueError, match="of one GPU and one microbatch"):
        held(model, replace(inside, batch=2 * tokens), "current")
    result = plan(
        "8b", 1, "current", "h100", optimizer="fused-stochastic", recompute=False, step_in_backward=True
    )
    assert result.layout.micro_batches == 1 and result.total_memory < 70 * 2**30
    for options, message in (
        ({"optimizer": "sgd"}, "use one of adamw,"),
        ({"saved_activations": "fp4"}, "use fp8"),
    ):
        with pytest.raises(ValueError, match=message):
            plan("8b", 1, **options)


def test_the_follow_up_of_a_plan_has_its_options(capsys: pytest.CaptureFixture) -> None:
    """It doubled the GPUs, without a reason."""
    assert cli.main(["plan", "--model", "70b", "--gpus", "256"]) == 0
    follow_up = capsys.readouterr().out.splitlines()[-1]
    assert follow_up.endswith(" plan --model 70b --gpus 256 --json   # all numbers, with MFU")
