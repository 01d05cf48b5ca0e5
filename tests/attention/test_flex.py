"""FlexAttention, on a CPU without its kernel: the functions of pairs say what the other backends say with tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attend import Case, assert_equal, soft_cap
from torch._dynamo.testing import CompileCounterWithBackend

from narrowcast.attention import core, flex


@pytest.fixture
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(core, "choose_backend", lambda *_: "flex")


@pytest.mark.parametrize(
    "qkv_format, mask, lengths, options",
    [
        ("bshd", "causal", "same", {"window": (2, 0)}),
        ("sbhd", "causal_bottom_right", "fewer queries", {"bias": "alibi", "groups": 2}),
        ("bshd", "padding", "same", {"softmax": "learnable"}),
        ("bshd", "padding_causal_bottom_right", "fewer keys", {"window": (1, 0), "bias": "alibi"}),
        ("thd", "padding_causal", "same", {"softmax": "off-by-one"}),
        ("thd", "padding_causal_bottom_right", "fewer queries", {"bias": "alibi", "groups": 1}),
        ("bshd", "arbitrary", "same", {"softmax": "learnable"}),
        ("bshd", "no_mask", "same", {"dim_v": 12}),
    ],
)
def test_against_the_definition(
    flex_on_a_cpu: None, qkv_format: str, mask: str, lengths: str, options: dict[str, Any]
) -> None:
    case = Case(qkv_format, mask, lengths, **options)
    assert_equal(case.run(), case.expected())


@pytest.mark.parametrize("qkv_format, mask", [("bshd", "no_mask"), ("thd", "padding")])
def test_a_function_of_the_scores(flex_on_a_cpu: None, qkv_format: str, mask: str) -> None:
    case = Case(qkv_format, mask, "same")
    cap = torch.tensor(0.7)
    ours = case.run(score_mod=soft_cap, score_mod_tensors={"cap": cap})
    assert_equal(ours, case.expected(lambda score, h, q, kv: soft_cap(score, None, h, q, kv, cap)))


def test_compiled_is_eager(flex_on_a_cpu: None) -> None:
    case = Case("bshd", "causal", "same", window=(2, 0))
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    assert_equal(case.run(compiled), case.run(), 1e-6)


def test_what_eager_code_calls_is_compiled_once(flex_on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("thd", "padding_causal", "same", softmax="learnable")
    eager = case.run()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex, "attend", torch.compile(flex._attend, fullgraph=True, backend=counter))
    for _ in range(3):
        assert_equal(case.run(), eager, 1e-6)
    assert counter.frame_count == 1
