"""What attention refuses, before anything is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.attention import standard_slopes
from narrowcast.attention.masks import mask_rule

ROWS = torch.randn(2, 4, 2, 8)
CU = torch.tensor([0, 2, 4], dtype=torch.int32)
MASK = torch.zeros(2, 1, 1, 4, dtype=torch.bool)

CONSTRUCTION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_gqa_groups": 3}, ValueError, "num_gqa_groups=3"),
    ({"tp_size": 3}, ValueError, "tp_size=3"),
    ({"qkv_format": "bhsd"}, ValueError, "bhsd"),
    ({"attn_mask_type": "causa"}, ValueError, "causa"),
    ({"window_size": (1, -2)}, ValueError, "window_size"),
    ({"softmax_type": "sink"}, ValueError, "sink"),
    ({"attention_type": "other"}, ValueError, "other"),
    ({"attention_dropout": 1.0}, ValueError, "attention_dropout"),
    ({"cp_group": object()}, NotImplementedError, "context parallelism"),
    ({"cp_group": object(), "cp_comm_type": "all_gather"}, TypeError, "cp_group is an object"),
]

FORWARD: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"query_layer": ROWS[0]}, ValueError, "4 dims"),
    ({}, {"query_layer": ROWS[..., :4]}, ValueError, r"\(2, 8\)"),
    ({}, {"key_layer": ROWS[:, :, :1]}, ValueError, "key_layer"),
    ({}, {"key_layer": ROWS[:, :3]}, ValueError, "value_layer"),
    ({}, {"query_layer": ROWS[:1]}, ValueError, "one batch size"),
    ({}, {"value_layer": ROWS.double()}, TypeError, "float64"),
    ({}, {"key_layer": None}, ValueError, "key_layer"),
    ({}, {"qkv_layer": ROWS}, ValueError, "alone"),
    ({}, {"key_layer": None, "value_layer": None, "kv_layer": ROWS}, ValueError, "of size 2"),
    (
        {},
        {"key_layer": None, "value_layer": None, "kv_layer": ROWS, "qkv_interleave_dim": 1},
        ValueError,
        "-3",
    ),
    ({}, {"attn_mask_type": "tril"}, ValueError, "tril"),
    ({}, {"attn_mask_type": "padding"}, ValueError, "attention_mask is None"),
    ({}, {"attn_mask_type": "padding", "attention_mask": MASK.int()}, TypeError, "torch.bool"),
    ({}, {"attn_mask_type": "padding", "attention_mask": MASK[:1]}, ValueError, "expected"),
    (
        {},
        {"attn_mask_type": "padding", "attention_mask": [MASK]},
        TypeError,
        "attention_mask is .* give a tensor",
    ),
    (
        {},
        {"attn_mask_type": "arbitrary", "attention_mask": MASK[0]},
        ValueError,
        r"'arbitrary' has shape \(1, 1, 4\); use one tensor .* of shape \(2, 2, 4, 4\), dims may be 1",
    ),
    (
        {},
        {"attn_mask_type": "arbitrary", "attention_mask": MASK[..., :3]},
        ValueError,
        r"has shape \(2, 1, 1, 3\)",
    ),
    ({}, {"attn_mask_type": "arbitrary", "attention_mask": (MASK, MASK)}, ValueError, "is a tuple of 2"),
    ({}, {"core_attention_bias_type": "post_scale_bias"}, ValueError, "not given"),
    ({}, {"core_attention_bias": torch.zeros(1, 2, 4, 4)}, ValueError, "given"),
    ({}, {"core_attention_bias_type": "rel"}, ValueError, "rel"),
    ({}, {"alibi_slopes": torch.ones(2)}, ValueError, "alibi"),
    ({}, {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes"),
    ({}, {"cu_seqlens_q": CU}, ValueError, "come together"),
    ({}, {"cu_seqlens_q": CU[:2], "cu_seqlens_kv": CU[:2]}, ValueError, r"batch \+ 1 = 3"),
    ({}, {"cu_seqlens_q": CU.long(), "cu_seqlens_kv": CU}, TypeError, "int32"),
    (
        {},
        {"cu_seqlens_q": CU * 3, "cu_seqlens_kv": CU},
        ValueError,
        "cu_seqlens_q is .* longer than the 4 tokens",
    ),
    ({}, {"inference_params": object()}, ValueError, "attn_mask_type is .* with inference_params"),
    ({}, {"fp8_output": True}, NotImplementedError, "fp8_output"),
    ({}, {"bf16_backward": True}, NotImplementedError, "bf16_backward"),
    ({}, {"num_splits": 2}, NotImplementedError, "num_splits"),
    ({}, {"score_mod_bprop": print}, NotImplementedError, "score_mod_bprop"),
    ({}, {"score_mod": print, "core_attention_bias_type": "alibi"}, ValueError, "score_mod"),
    ({"attention_dropout": 0.1}, {"score_mod": print}, ValueError, "dropout"),
]

THD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attn_mask_type": "causal"}, ValueError, "takes padding types"),
    ({"cu_seqlens_q": None, "cu_seqlens_kv": None}, ValueError, "needs cu_seqlens_q"),
    ({"pad_between_seqs": True}, ValueError, "cu_seqlens_q_padded"),
    ({"cu_seqlens_q": CU.flip(0)}, ValueError, r"^cu_seqlens_q is \[4, 2, 0\]; .* never decrease"),
    ({"cu_seqlens_kv": CU - 1}, ValueError, "cu_seqlens_kv is .* begin at 0"),
    ({"cu_seqlens_kv": CU * 5}, ValueError, r"cu_seqlens_kv is .* and ends beyond the 4 tokens"),
    (
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": ROWS},
        ValueError,
        "qkv_format='thd'",
    ),
]


@pytest.mark.parametrize("options, error, words", CONSTRUCTION)
def test_refused_when_made(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nc.DotProductAttention(4, 8, **options)


@pytest.mark.parametrize("options, given, error, words", FORWARD)
def test_refused_when_called(
    options: dict[str, Any], given: dict[str, Any], error: type[Exception], words: str
) -> None:
    module = nc.DotProductAttention(2, 8, qkv_format="bshd", **options)
    tensors = {"query_layer": ROWS, "key_layer": ROWS, "value_layer": ROWS}
    with pytest.raises(error, match=words):
        module(**{**tensors, **given})


IGNORED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("bshd", {}, {"attention_mask": MASK}, "attention_mask is ignored.*'causal'.*reads none"),
    (
        "thd",
        {"attn_mask_type": "padding", "cu_seqlens_q": CU, "cu_seqlens_kv": CU},
        {"attention_mask": MASK},
        "attention_mask is ignored.*'thd' reads none",
    ),
    ("bshd", {}, {"cu_seqlens_q_padded": CU, "cu_seqlens_kv_padded": CU}, "cu_seqlens_q_padded .* ignored"),
    ("sbhd", {}, {"cu_seqlens_q_padded": CU.long()}, "cu_seqlens_q_padded .* ignored"),
]


@pytest.mark.parametrize("fmt, options, ignored, words", IGNORED)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_ignored_with_a_warning(
    fmt: str, options: dict[str, Any], ignored: dict[str, Any], words: str, compiled: bool
) -> None:
    """As Transformer Engine ignores them; what comes out is what comes out without."""
    torch._dynamo.reset()
    module = nc.DotProductAttention(2, 8, qkv_format=fmt)
    tensors = [torch.randn(4, 2, 8) if fmt == "thd" else ROWS for _ in range(3)]
    expected = module(*tensors, **options)
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with pytest.warns(UserWarning, match=words):
        out = run(*tensors, **options, **ignored)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("given, error, words", THD)
def test_refused_of_packed_tokens(given: dict[str, Any], error: type[Exception], words: str) -> None:
    module = nc.DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding")
    tokens = dict.fromkeys(("query_layer", "key_layer", "value_layer"), ROWS[0])
    with pytest.raises(error, match=words):
        module(**{**tokens, "cu_seqlens_q": CU, "cu_seqlens_kv": CU, **given})


def test_no_backend_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_UNFUSED_ATTN", "0")
    module = nc.DotProductAttention(2, 8, qkv_format="bshd", softmax_type="off-by-one")
    with pytest.raises(ValueError, match=r"sdpa: its softmax.*unfused: NARROWCAST_UNFUSED_ATTN is 0"):
        module(ROWS, ROWS, ROWS)
    monkeypatch.setenv("NARROWCAST_FLASH_ATTN", "0")
    module = nc.DotProductAttention(2, 8, qkv_format="bshd")
    with pytest.raises(
        ValueError, match="no kernel of PyTorch's is left.*; set NARROWCAST_UNFUSED_ATTN=1 and make the"
    ):
        module(ROWS, ROWS, ROWS)
    monkeypatch.delenv("NARROWCAST_UNFUSED_ATTN")
    plain = nc.DotProductAttention(2, 8, qkv_format="bshd")
    monkeypatch.delenv("NARROWCAST_FLASH_ATTN")
    other = nc.DotProductAttention(2, 8, qkv_format="bshd")
    torch.testing.assert_close(plain(ROWS, ROWS, ROWS), other(ROWS, ROWS, ROWS))


def test_the_choice_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NARROWCAST_DEBUG", "1")
    monkeypatch.setenv("NARROWCAST_DEBUG_LEVEL", "2")
    module = nc.DotProductAttention(2, 8, qkv_format="bshd", softmax_type="off-by-one")
    with caplog.at_level("INFO", logger="narrowcast.attention"):
        module(ROWS, ROWS, ROWS)
    assert "attention by unfused; refused" in caplog.text and "its softmax is 'vanilla'" in caplog.text
    monkeypatch.setenv("NARROWCAST_DEBUG_LEVEL", "all")
    with pytest.raises(ValueError, match="DEBUG_LEVEL"):
        nc.DotProductAttention(2, 8)


@pytest.mark.parametrize("heads", [1, 2, 8, 12])
def test_slopes_of_the_paper(heads: int) -> None:
    slopes = standard_slopes(heads, torch.device("cpu"))
    expected = {1: [2**-8], 2: [2**-4, 2**-8], 8: [2.0**-i for i in range(1, 9)]}
    expected[12] = expected[8] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    torch.testing.assert_close(slopes, torch.tensor(expected[heads]))


def test_the_rule_of_a_mask_is_a_value() -> None:
    rule = mask_rule("causal")
    assert rule == mask_rule("causal") and hash(rule) == hash(mask_rule("causal"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.bottom_right = True  # type: ignore[misc]
