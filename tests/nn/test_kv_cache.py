"""A KV cache gives what recomputing everything gives, whatever sequences come and go, contiguous and in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recipes import DEVICE, EMULATE
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast.attention import KVCacheManager, Switches, core
from narrowcast.attention.backends import Facts, choose_backend
from narrowcast.testing import assert_close

H, HEADS, GROUPS, LONGEST = 32, 4, 2, 12
SCENARIO: list[dict[str, int]] = [
    {"a": 4, "b": 2},  # prompts of different lengths
    {"a": 1, "b": 1},
    {"b": 1, "c": 3},  # a goes, b moves up, c comes
    {"c": 1, "b": 1},  # another order
    {"d": 2, "c": 2, "b": 1, "a": 3},  # as many as there can be; a comes back and begins anew
    {"a": 1, "d": 0, "c": 2, "b": 1},  # nothing new of d
]


class Stack(nn.Module):
    """Two layers with a rotary embedding, called with a KV cache or without."""

    def __init__(self, fmt: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nc.TransformerLayer(
                H, 48, HEADS, num_gqa_groups=GROUPS, layer_number=i + 1, attn_input_format=fmt, device=DEVICE,
                self_attn_mask_type="padding_causal", init_method=wide, params_dtype=dtype, **options,
            )
            for i in range(2)
        )  # fmt: skip
        self.register_buffer(
            "angles", nc.RotaryPositionEmbedding(H // HEADS, rotary_base=50.0).to(DEVICE)(LONGEST + 4)
        )
        self.eval()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, **options)
        return x


def wide(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.3)


def tokens_of(sequence: str) -> Tensor:
    """(LONGEST, H), the same for a name in every test."""
    values = torch.randn(LONGEST, H, generator=torch.Generator().manual_seed(ord(sequence[0])))
    return values * float("nan") if sequence == "worse" else values


def whole(model: Stack) -> dict[str, Tensor]:
    """(LONGEST, H) of each sequence, without a cache."""
    found = {}
    for name in "abcd":
        x = in_format([tokens_of(name)], model.layers[0].attn_input_format, LONGEST)
        cu = torch.tensor([0, LONGEST], dtype=torch.int32, device=DEVICE)
        found[name] = model(x, cu_seqlens_q=cu, cu_seqlens_kv=cu).reshape(LONGEST, H).clone()
    return found


def in_format(rows: list[Tensor], fmt: str, width: int, fill: float = 0.0) -> Tensor:
    """Tokens of the sequences of a batch, padded to ``width`` or packed."""
    if fmt == "thd":
        return torch.cat([*rows, torch.full((2, H), fill)]).to(DEVICE) if fill else torch.cat(rows).to(DEVICE)
    padded = torch.stack([torch.cat((row, torch.full((width - len(row), H), fill))) for row in rows])
    return (padded if fmt == "bshd" else padded.transpose(0, 1)).to(DEVICE)


def of_sequences(out: Tensor, counts: list[int], fmt: str) -> list[Tensor]:
    if fmt == "thd":
        return list(out[: sum(counts)].split(counts))
    rows = out if fmt == "bshd" else out.transpose(0, 1)
    return [row[:count] for row, count in zip(rows, counts)]


def run(
    model: Stack,
    params: nc.InferenceParams,
    steps: list[dict[str, int]],
    forward: Callable[..., Tensor] | None = None,
    width: int | None = None,
) -> Iterator[tuple[str, slice, Tensor]]:
    """The outputs of the new tokens: sequence, their places in it, (tokens, H)."""
    fmt = model.layers[0].attn_input_format
    for step in steps:
        before = {name: params.sequences.get(name, 0) for name in step}
        params.pre_step(step)
        rows = [tokens_of(name)[before[name] : before[name] + new] for name, new in step.items()]
        x = in_format(rows, fmt, width or max(step.values()) + 1, fill=3.0)  # padding is no zero
        out = (model if forward is None else forward)(x, inference_params=params)
        for (name, new), own in zip(step.items(), of_sequences(out, list(step.values()), fmt)):
            yield name, slice(before[name], before[name] + new), own.clone()


def cache(fmt: str, paged: bool, **options: Any) -> nc.InferenceParams:
    if paged:  # fewer pages than all sequences at full length would need
        options = {"is_paged": True, "page_size": 3, "total_num_pages": 13, **options}
    if fmt == "thd":
        options["max_ctx_len"] = 6
    return nc.InferenceParams(4, LONGEST, qkv_format=fmt, device=DEVICE, **options)


BOTH = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


@BOTH
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@torch.inference_mode()
def test_a_cache_equals_recomputation(fmt: str, paged: bool) -> None:
    model = Stack(fmt, fuse_qkv_params=paged)
    expected, params = whole(model), cache(fmt, paged)
    for _ in range(2):  # and once more after a reset
        for name, places, own in run(model, params, SCENARIO):
            if len(own):
                assert_close(own, expected[name][places], "fp32_layer")
        params.reset()


@torch.no_grad()
def test_a_recipe_that_scales_each_token() -> None:
    model = nc.set_recipe(Stack("bshd"), nc.recipe.MXFP8BlockScaling(emulate=EMULATE))
    expected = whole(model)
    for name, places, own in run(model, cache("bshd", True), SCENARIO[:2]):
        assert_close(own, expected[name][places], "fp8_flips")


DECODING: list[dict[str, int]] = [
    {"a": 3, "b": 5, "c": 2},
    *[{"a": 1, "b": 1, "c": 1}] * 4,
    {"a": 0, "b": 1, "d": 1},
    {"b": 1, "a": 1, "d": 1},
]


@BOTH
@torch.no_grad()
def test_compiled_decoding_equals_eager_in_one_graph(paged: bool) -> None:
    """Tokens one by one, sequences coming, going and moving among them: one graph, and nothing beside it."""
    model = Stack("bshd", qk_norm_type="RMSNorm")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    theirs = [own for _, _, own in run(model, cache("bshd", paged), DECODING)]
    params = cache("bshd", paged)
    ours = [own for _, _, own in run(model, params, DECODING[:1])]
    ours += [own for _, _, own in run(model, params, DECODING[1:], compiled, width=2)]
    assert counter.frame_count == 1
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The operator for one query takes such calls, also on a CPU; whether each call of attention was one."""
    seen: list[bool] = []

    def choose(facts: Facts, switches: Switches) -> str:
        if not torch.compiler.is_compiling():
            seen.append(facts.decoding)
        return "decode" if facts.decoding else choose_backend(facts, switches)

    monkeypatch.setattr(core, "choose_backend", choose)
    return seen


@pytest.mark.parametrize(
    "options", [{}, {"window_size": (3, 0), "softmax_type": "learnable"}], ids=["", "sink"]
)
@pytest.mark.parametrize(("fmt", "paged"), [("bshd", False), ("sbhd", True), ("thd", False)])
@torch.no_grad()
def test_one_query_per_sequence(
    fmt: str, paged: bool, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """The operator gives what the other backends do, with sequences that come, go and get no token."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = Stack(fmt, dtype, **options)
    for layer in model.layers:
        for offset in [p for name, p in layer.named_parameters() if name.endswith("softmax_offset")]:
            nn.init.normal_(offset)
    forward = bf16(model) if DEVICE == "cuda" else model
    theirs = [own for _, _, own in run(model, cache(fmt, paged), DECODING, forward)]
    seen = request.getfixturevalue("decodes")
    params = cache(fmt, paged)
    ours = [own for _, _, own in run(model, params, DECODING[:1], forward)]
    params.max_ctx_len = 1
    ours += [own for _, _, own in run(model, params, DECODING[1:], forward, width=1)]
    assert seen == [False] * 2 + [True] * 2 * len(DECODING[1:])
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "fp32_layer" if DEVICE == "cpu" else "bf16_output")


@torch.no_grad()
def test_one_query_per_sequence_compiled(decodes: list[bool]) -> None:
    attention = nc.DotProductAttention(4, 8, num_gqa_groups=2, layer_number=1, qkv_format="bshd").to(DEVICE)
    steps = [[torch.randn(2, 1, heads, 8, device=DEVICE).bfloat16() for heads in (4, 2, 2)] for _ in range(3)]
    outputs = []
    for run_ in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        params = cache("bshd", False)
        params.allocate_memory(1, *steps[0][1:])
        for step in steps:
            params.pre_step({"a": 1, "b": 1})
            outputs.append(run_(*step, attn_mask_type="padding_causal", inference_params=params))
    assert decodes == [True] * 3
    for a, b in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_compiled_code_does_not_make_the_memory() -> None:
    model, params = Stack("bshd"), cache("bshd", False)
    params.pre_step({"a": 1})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"call allocate_memory\(1\) first"):
        compiled(torch.randn(1, 1, H, device=DEVICE), inference_params=params)
    assert not params.has_layer(1)


@pytest.mark.gpu
@BOTH
@torch.no_grad()
def test_a_decode_step_in_a_cuda_graph(paged: bool) -> None:
    """Captured once, replayed for every later token: equal to eager decoding, with sequences coming and going."""
    model = Stack("bshd", torch.bfloat16)
    params = cache("bshd", paged)
    theirs = [own for _, _, own in run(model.to(DEVICE), cache("bshd", paged), DECODING, bf16(model))]
    ours = [own for _, _, own in run(model, params, DECODING[:1], bf16(model))]
    static = torch.zeros(3, 2, H, device=DEVICE)
    stream = torch.cuda.Stream()
    sequences, lengths = params.sequences, params._lengths.clone()
    with torch.cuda.stream(stream):  # warm up, into slots that the steps below write again
        bf16(model)(static, inference_params=params)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bf16(model)(static, inference_params=params)
    assert params.sequences is sequences and torch.equal(params._lengths, lengths)

    def replay(x: Tensor, inference_params: nc.InferenceParams) -> Tensor:
        static.copy_(x)
        graph.replay()
        return out

    # the warm-up has written the prompts' slots: begin anew
    params.reset()
    ours = [own for _, _, own in run(model, params, DECODING[:1], bf16(model))]
    ours += [own for _, _, own in run(model, params, DECODING[1:], replay, width=2)]
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "bf16_output")


@pytest.mark.gpu
@torch.no_grad()
def test_compiled_decoding_with_cuda_graphs() -> None:
    """``mode="reduce-overhead"``: the cache is written where it is, not copied in and out."""
    model = Stack("bshd", torch.bfloat16)
    theirs = [own for _, _, own in run(model, cache("bshd", True), DECODING, bf16(model))]
    params = cache("bshd", True)
    ours = [own for _, _, own in run(model, params, DECODING[:1], bf16(model))]
    keys = params.cache_manager.caches[1][0].data_ptr()
    counters = torch._dynamo.utils.counters["inductor"]
    skipped = counters["cudagraph_skips"]
    compiled = torch.compile(bf16(model), fullgraph=True, mode="reduce-overhead")
    ours += [own for _, _, own in run(model, params, DECODING[1:], compiled, width=2)]
    assert params.cache_manager.caches[1][0].data_ptr() == keys
    assert counters["cudagraph_skips"] == skipped
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "fp8_flips")


def bf16(model: Stack) -> Callable[..., Tensor]:
    def forward(x: Tensor, **options: Any) -> Tensor:
        return model(x.bfloat16(), **options)

    return forward


# -- what the cache does with its memory ----------------------------------------------------------------------------


@BOTH
@torch.no_grad()
def test_a_sequence_that_went_wrong_spoils_no_other(paged: bool) -> None:
    model = Stack("bshd")
    params = cache("bshd", paged)
    params.pre_step({"bad": 8, "worse": 2})
    model(torch.full((2, 8, H), float("nan"), device=DEVICE), inference_params=params)
    expected = whole(model)
    for name, places, own in run(model, params, [{"worse": 1, "b": 3, "c": 1}, {"b": 1, "c": 1}]):
        if name == "worse":
            assert own.isnan().all()
        else:
            assert_close(own, expected[name][places], "fp32_layer")


def test_pages_are_taken_and_given_back() -> None:
    params = cache("bshd", True, num_heads_kv=GROUPS, head_dim_k=8, dtype=torch.float32, total_num_pages=5)
    params.allocate_memory(1)
    key = torch.randn(2, 7, GROUPS, 8, device=DEVICE)
    assert params.pre_step({"a": 7, "b": 2}) == {"a": 7, "b": 2}  # 3 pages and 1
    keys, _, table = params.step(1, key, -key, "bshd")
    assert keys.shape == (6, 3, GROUPS, 8) and table is not None and table.shape == (2, LONGEST // 3)
    whole_keys, whole_values = params.convert_paged_to_nonpaged(1)
    assert whole_keys.shape == (2, LONGEST, GROUPS, 8)
    assert torch.equal(whole_keys[0, :7], key[0]) and torch.equal(whole_values[1, :2], -key[1, :2])
    with pytest.raises(RuntimeError, match="the step needs 2 pages more, 1 of 5 are free"):
        params.pre_step({"a": 3, "b": 2})
    assert params.get_seqlens_pre_step().tolist() == [0, 0] and params.sequences == {"a": 7, "b": 2}
    params.pre_step({"b": 2, "c": 9})  # a's pages
    assert params.get_seqlens_pre_step().tolist() == [2, 0]
    assert params.cu_seqlens_q.tolist() == [0, 2, 11] and params.cu_seqlens_kv.tolist() == [0, 4, 13]


def test_sizes_come_from_the_first_key() -> None:
    params = cache("bshd", False)
    with pytest.raises(ValueError, match="num_heads_kv=None"):
        params.allocate_memory(1)
    key, value = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 6)
    params.allocate_memory(1, key, value)
    assert [part.shape[1:] for part in params.cache_manager.caches[1]] == [(2, 8), (2, 6)]


class Counting(KVCacheManager):
    steps = 0

    def step(self, *arguments: Any) -> Any:
        self.steps += 1
        return super().step(*arguments)


@torch.no_grad()
def test_a_custom_manager_keeps_the_tokens() -> None:
    model, manager = Stack("bshd"), Counting(4, LONGEST, device=torch.device(DEVICE))
    expected = whole(model)
    params = cache("bshd", False, custom_cache_manager=manager)
    for name, places, own in run(model, params, SCENARIO[:2]):
        assert_close(own, expected[name][places], "fp32_layer")
    assert manager.steps == 4


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"is_paged": True}, "is_paged=True needs page_size"),
        ({"qkv_format": "thd"}, "'thd' needs max_ctx_len"),
        ({"qkv_format": "hbsd"}, "hbsd"),
    ],
)
def test_wrong_sizes_are_told(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        nc.InferenceParams(**{"max_batch_size": 2, "max_sequence_length": 8, "device": DEVICE, **options})


def test_a_dtype_by_name_is_told() -> None:
    with pytest.raises(TypeError, match="dtype is 'bf16'; use torch.bfloat16"):
        nc.InferenceParams(2, 8, dtype="bf16", device=DEVICE)  # type: ignore[arg-type]


def test_wrong_steps_are_told() -> None:
    params = nc.InferenceParams(2, 8, 2, 8, torch.float32, device=DEVICE)
    with pytest.raises(RuntimeError, match="full: 3 sequences of at most max_batch_size=2"):
        params.pre_step(dict.fromkeys("abc", 1))
    params.pre_step({"a": 8})
    with pytest.raises(RuntimeError, match=r"longer than max_sequence_length=8: \{'a': 9\}"):
        params.pre_step({"a": 1})
    for step in ({}, {"a": -1}):
        with pytest.raises(ValueError, match="give the new tokens"):
            params.pre_step(step)
    key = torch.zeros(1, 8, 2, 8, device=DEVICE)
    with pytest.raises(KeyError, match="no memory for layer 1"):
        params.step(1, key, key, "bshd")
    with pytest.raises(KeyError, match="no memory for layer 1"):
        params.convert_paged_to_nonpaged(1)
    params.allocate_memory(1)
    with pytest.raises(ValueError, match="the step has 1 sequences, call pre_step"):
        params.step(1, key.expand(2, -1, -1, -1), key, "bshd")
    with pytest.raises(ValueError, match="need max_ctx_len"):
        params.token_of(3)


def test_a_cache_with_gradients_enabled_gives_none_and_says_so() -> None:
    model, x = Stack("bshd"), torch.randn(1, 2, H, device=DEVICE)
    outs = []
    for enabled in (False, True):
        params = cache("bshd", False)
        params.pre_step({"a": 2})
        attention = nc.DotProductAttention(
            HEADS, H // HEADS, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1
        )
        q = x.detach().view(1, 2, HEADS, H // HEADS).requires_grad_(enabled)
        with torch.set_grad_enabled(enabled):
            if enabled:
                with pytest.warns(UserWarning, match="with gradients enabled: none flow through attention"):
                    outs.append(attention(q, q, q, inference_params=params))
            else:
                outs.append(attention(q, q, q, inference_params=params))
    assert torch.equal(*outs) and not outs[1].requires_grad
    params = cache("bshd", False)
    params.pre_step({"a": 2})
    with pytest.warns(UserWarning, match="run under torch.no_grad"):  # in a layer, all the same
        out = model(x, inference_params=params)
    out.sum().backward()


def test_wrong_calls_with_a_cache_are_told() -> None:
    model, params = Stack("bshd"), cache("bshd", False)
    params.pre_step({"a": 2})
    x = torch.randn(1, 2, H, device=DEVICE)
    with torch.no_grad():
        with pytest.raises(ValueError, match="attn_mask_type is 'causal' with inference_params"):
            model(x, inference_params=params, self_attn_mask_type="causal")
        with pytest.raises(ValueError, match="needs self attention and a layer_number"):
            nc.TransformerLayer(H, 48, HEADS, device=DEVICE)(x, inference_params=params)
        attention = nc.DotProductAttention(
            2, 4, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1
        )
        with pytest.raises(ValueError, match="qkv_layer or kv_layer with inference_params"):
            attention(qkv_layer=torch.randn(1, 2, 3, 2, 4), inference_params=params)
