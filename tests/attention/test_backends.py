"""The kernels that PyTorch may choose from, by static facts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import narrowcast as nc
from narrowcast.attention import Switches, core, sdpa
from narrowcast.attention.backends import Facts, choose_backend, is_cudnn_safe, sdpa_kernels


def facts(**changed: Any) -> Facts:
    given: dict[str, Any] = {
        "cuda": True,
        "dtype": torch.bfloat16,
        "dims": (64, 64),
        "packed": False,
        "gaps": False,
        "mask": "tensor",
        "from_the_end": True,
        "bias": None,
        **dict.fromkeys(("alibi", "sink", "score_mod", "dropout", "max_logit", "score_grad"), False),
        "grad": True,
        "lengths": (192, 192),
    }
    return Facts(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "safe"),
    [
        ({}, False),
        ({"mask": "none"}, False),
        ({"mask": "pairs"}, False),
        ({"mask": "none", "bias": torch.bfloat16}, False),
        ({"lengths": (100, 64)}, False),
        ({"lengths": (1, 100)}, False),
        ({"mask": "causal", "lengths": (320, 192)}, False),
        ({"mask": "causal"}, True),
        ({"mask": "causal", "lengths": (128, 192)}, True),
        ({"lengths": (64, 128)}, True),
        ({"lengths": (193, 193)}, True),
        ({"grad": False}, True),
        ({"cuda": False}, True),
    ],
)
def test_cudnn_gets_no_gradient_that_it_may_spoil(changed: dict[str, Any], safe: bool) -> None:
    call = facts(**changed)
    assert is_cudnn_safe(call) is safe
    kernels = sdpa_kernels(call, Switches())
    assert (SDPBackend.CUDNN_ATTENTION in kernels) is (safe and call.cuda)
    assert SDPBackend.MATH in kernels and (SDPBackend.EFFICIENT_ATTENTION in kernels) is call.cuda


def test_only_an_unsafe_call_is_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    attend = sdpa.attend
    monkeypatch.setattr(
        sdpa, "attend", lambda *given, **named: seen.append(given[4]) or attend(*given, **named)
    )
    monkeypatch.setattr(core, "is_cudnn_safe", lambda call: call.lengths != (64, 64))
    monkeypatch.setattr(core, "sdpa_kernels", lambda *_: [SDPBackend.MATH])
    module = nc.DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="arbitrary")
    for keys in (63, 64):
        x = torch.randn(1, keys, 2, 8)
        module(x, x, x, attention_mask=torch.zeros(1, 1, keys, keys, dtype=torch.bool))
    assert seen == [None, [SDPBackend.MATH]]


@pytest.mark.parametrize(
    ("changed", "backend"),
    [
        ({}, "decode"),
        ({"sink": True}, "decode"),
        ({"decoding": False}, "sdpa"),
        ({"cuda": False}, "sdpa"),
        ({"dtype": torch.float32}, "sdpa"),
        ({"dims": (576, 512)}, "sdpa"),
        ({"bias": torch.bfloat16}, "sdpa"),
        ({"grad": True}, "sdpa"),
        ({"alibi": True}, "flex"),
        ({"score_mod": True}, "flex"),
        ({"max_logit": True}, "flex"),
        ({"batch_invariant": True}, "unfused"),
    ],
)
def test_one_query_of_each_sequence(
    changed: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowcast.kernels.AVAILABLE", True)
    call = facts(**{"decoding": True, "grad": False, "lengths": (1, 1024), **changed})
    assert choose_backend(call, Switches()) == backend
    assert choose_backend(call, Switches(fused=False)) != "decode"
    monkeypatch.setattr("narrowcast.kernels.AVAILABLE", False)
    assert choose_backend(call, Switches()) != "decode"


def test_the_log_names_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "narrowcast.attention")
    assert choose_backend(facts(mask="tensor"), Switches(debug=1)) == "sdpa"
    assert caplog.messages[0].startswith("attention by sdpa EFFICIENT_ATTENTION MATH (")
