"""Attention on a GPU: which backend each configuration gets, and that it computes what fp32 scores in memory give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import narrowcast as nc
from narrowcast.attention import core

pytestmark = pytest.mark.gpu

HEADS, DIM = 4, 64
LENGTHS = ([150, 37, 200], [150, 37, 200])


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, cap: Tensor) -> Tensor:
    return cap * torch.tanh(score / cap)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def operands(qkv_format: str, size: int, groups: int, dim_v: int, dtype: torch.dtype) -> list[Tensor]:
    lead = {"bshd": (3, size), "sbhd": (size, 3), "thd": (400,)}[qkv_format]
    shapes = ((HEADS, DIM), (groups, DIM), (groups, dim_v))
    return [torch.randn(*lead, *shape, device="cuda", dtype=dtype).requires_grad_(True) for shape in shapes]


def step(forward: Any, tensors: list[Tensor], leaves: list[Tensor], given: dict[str, Any]) -> list[Tensor]:
    out = forward(*tensors, **given)
    out, largest = out if isinstance(out, tuple) else (out, None)
    weight = torch.linspace(-1, 1, out.shape[-1], device="cuda")
    grads = torch.autograd.grad((out.float() * weight).sum(), leaves)
    return [out, *([] if largest is None else [largest]), *grads]


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for index, (a, b) in enumerate(zip(ours, theirs)):
        assert a.isfinite().all(), index
        error = (a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-3)
        assert error < 2e-2, (index, error)


PADDING = {"cu_seqlens_q": LENGTHS[0], "cu_seqlens_kv": LENGTHS[1]}
CASES: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("sdpa", "bshd", "causal", {}, {}),
    ("sdpa", "sbhd", "no_mask", {"num_gqa_groups": 2}, {}),
    ("sdpa", "bshd", "causal", {"dim_v": 32}, {}),
    ("sdpa", "bshd", "arbitrary", {"num_gqa_groups": 2}, {"attention_mask": 0.4}),
    ("sdpa", "sbhd", "causal", {}, {"core_attention_bias_type": "post_scale_bias"}),
    ("flex", "bshd", "causal", {"window_size": (40, 0)}, {}),
    ("flex", "bshd", "padding_causal", {"num_gqa_groups": 2}, PADDING),
    ("flex", "sbhd", "padding", {"softmax_type": "learnable", "return_max_logit": True}, PADDING),
    ("flex", "bshd", "causal_bottom_right", {}, {"core_attention_bias_type": "alibi"}),
    ("flex", "bshd", "no_mask", {"softmax_type": "off-by-one"}, {}),
    ("flex", "bshd", "causal", {}, {"score_mod": soft_cap}),
    ("flash_varlen", "thd", "padding_causal", {"num_gqa_groups": 2}, PADDING),
    ("flash_varlen", "thd", "padding", {"window_size": (30, 10)}, PADDING),
    ("flex", "thd", "padding_causal", {"softmax_type": "learnable"}, PADDING),
    ("flex", "thd", "padding_causal", {}, {**PADDING, "cu_seqlens_q_padded": [160, 40, 200]}),
]


HOWS: list[Any] = [("eager", *case) for case in CASES] + [("compiled", *CASES[i]) for i in (0, 3, 5, 7, 11)]
fails_before_2_12 = pytest.mark.xfail(
    TorchVersion(torch.__version__) < "2.12",
    reason="Inductor of PyTorch 2.11 cannot split the blocks of this mask when sizes become dynamic (CantSplit)",
)
HOWS.append(pytest.param("compiled", *CASES[8], marks=fails_before_2_12))


@pytest.mark.parametrize("how, backend, qkv_format, mask, options, given", HOWS)
def test_every_backend(
    how: str,
    backend: str,
    qkv_format: str,
    mask: str,
    options: dict[str, Any],
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = dict(options)
    dim_v = options.pop("dim_v", DIM)
    module = nc.DotProductAttention(
        HEADS, (DIM, dim_v), qkv_format=qkv_format, attn_mask_type=mask, **options
    ).cuda()
    if module.softmax_offset is not None:
        torch.nn.init.normal_(module.softmax_offset)
    chosen = []
    choose = core.choose_backend
    if how == "eager":
        monkeypatch.setattr(core, "choose_backend", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    forward = module if how == "eager" else torch.compile(module, fullgraph=True)
    for size in (200, 232):
        tensors = operands(qkv_format, size, options.get("num_gqa_groups", HEADS), dim_v, torch.bfloat16)
        kwargs = dict(given)
        for name in ("cu_seqlens_q", "cu_seqlens_q_padded"):
            if name in given:  # one tensor for both sides, as self-attention has it
                kwargs[name] = kwargs[name.replace("_q", "_kv")] = cumulative(given[name])
        leaves = [*tensors, *module.parameters()]
        exact = [x.detach().float().requires_grad_(True) for x in tensors]
        exact_leaves = [*exact, *module.parameters()]
        if mask == "arbitrary":
            kwargs["attention_mask"] = torch.rand(3, 1, size, size, device="cuda") < 0.4
        if "score_mod" in given:
            kwargs["score_mod_tensors"] = {"cap": torch.tensor(5.0, device="cuda")}
        exact_kwargs = dict(kwargs)
        if given.get("core_attention_bias_type") == "post_scale_bias":
            bias = torch.randn(1, HEADS, size, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            exact_bias = bias.detach().float().requires_grad_(True)
            kwargs["core_attention_bias"], exact_kwargs["core_attention_bias"] = bias, exact_bias
            leaves.append(bias)
            exact_leaves.append(exact_bias)
        ours = step(forward, tensors, leaves, kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(core, "choose_backend", lambda *_: "unfused")
            theirs = step(module, exact, exact_leaves, exact_kwargs)
        assert_near(ours, theirs)
    assert set(chosen) <= {backend} and (chosen or how == "compiled")


def test_flash_is_what_pytorch_takes_for_plain_causal() -> None:
    module = nc.DotProductAttention(HEADS, DIM, qkv_format="bshd")
    q, k, v = operands("bshd", 256, HEADS, DIM, torch.bfloat16)
    with torch.profiler.profile() as profile:
        module(q, k, v).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any("flash" in name or "cudnn" in name for name in names), names


def test_dropout_with_padding_and_packed_tokens() -> None:
    for qkv_format in ("bshd", "thd"):
        module = nc.DotProductAttention(
            HEADS, DIM, qkv_format=qkv_format, attn_mask_type="padding", attention_dropout=0.3
        )
        q, k, _ = operands(qkv_format, 200, HEADS, DIM, torch.bfloat16)
        cu = cumulative(LENGTHS[0])
        out = module(q, k, torch.ones_like(k), cu_seqlens_q=cu, cu_seqlens_kv=cu)
        tokens = out[:387] if qkv_format == "thd" else out[2]
        assert abs(tokens.float().mean() - 1) < 0.05
        out.float().sum().backward()
        assert q.grad is not None and q.grad.isfinite().all()


def test_deterministic_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_ALLOW_NONDETERMINISTIC_ALGO", "0")
    module = nc.DotProductAttention(HEADS, DIM, qkv_format="bshd")
    tensors = operands("bshd", 512, HEADS, DIM, torch.bfloat16)
    first = step(module, tensors, tensors, {})
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(step(module, tensors, tensors, {}), first))


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("queries, keys", [(64, 64), (320, 192), (1, 128), (256, 256), (1000, 1000)])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "arbitrary"])
def test_gradients_of_queries_whose_scores_are_very_negative(
    mask: str, queries: int, keys: int, how: str
) -> None:
    """cuDNN, which PyTorch would choose, gives NaN where keys % 128 == 64 and no causal mask hides the rest."""
    module = nc.DotProductAttention(HEADS, DIM, qkv_format="bshd", attn_mask_type=mask).cuda()
    q, k, v = (torch.randn(2, size, HEADS, DIM, device="cuda") for size in (queries, keys, keys))
    q[..., 0], k[..., 0] = 1.0, -120 * DIM**0.5
    tensors = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    given = {}
    if mask == "arbitrary":
        given["attention_mask"] = torch.ones(1, 1, queries, keys, dtype=torch.bool, device="cuda").triu(1)
    forward = module if how == "eager" else torch.compile(module, fullgraph=True)
    for result in step(forward, tensors, tensors, given):
        assert result.isfinite().all()
