"""Every configuration of attention against its definition, in fp32: outputs and all gradients."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import oracle
import pytest
import torch
from covering import covering
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend

import narrowcast as nc
from narrowcast.attention import core, sdpa
from narrowcast.testing import assert_close

HEADS, DIM = 4, 8
LENGTHS = {"same": (7, 7), "fewer queries": (5, 7), "fewer keys": (7, 4)}
MASKS = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "arbitrary",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(True)


class Case:
    """Tensors of one configuration, the module that computes it, and what the definition says."""

    def __init__(
        self,
        qkv_format: str,
        mask: str,
        lengths: str,
        groups: int = HEADS,
        dim_v: int = DIM,
        dtype: torch.dtype = torch.float32,
        softmax: str = "vanilla",
        bias: str = "no_bias",
        window: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        size_q, size_kv = LENGTHS[lengths]
        self.fmt, self.mask, self.bias, self.window = qkv_format, mask, bias, window
        ragged = "padding" in mask
        self.n_q = [size_q, size_q - 3] if ragged else [size_q] * 2
        self.n_kv = [size_kv - 2, size_kv] if ragged else [size_kv] * 2
        if ragged and lengths == "same":
            self.n_kv = self.n_q
        if qkv_format == "thd":
            shapes = [(sum(self.n_q),), (sum(self.n_kv),)]
        else:
            shapes = [(size, 2) if qkv_format == "sbhd" else (2, size) for size in (size_q, size_kv)]
        self.q = leaf(*shapes[0], HEADS, DIM, dtype=dtype)
        self.k = leaf(*shapes[1], groups, DIM, dtype=dtype)
        self.v = leaf(*shapes[1], groups, dim_v, dtype=dtype)
        self.given: dict[str, Any] = {}
        self.masked_out = None
        if mask == "arbitrary":
            self.masked_out = torch.rand(2, HEADS, size_q, size_kv) < 0.4
            self.masked_out[0, :, 1] = True  # a query that sees nothing
            self.given["attention_mask"] = self.masked_out
        elif qkv_format == "thd":
            self.given.update(cu_seqlens_q=cumulative(self.n_q), cu_seqlens_kv=cumulative(self.n_kv))
        elif ragged:
            pair = [
                (torch.arange(size)[None] >= torch.tensor(n)[:, None])[:, None, None]
                for size, n in ((size_q, self.n_q), (size_kv, self.n_kv))
            ]
            self.given["attention_mask"] = pair[0] if lengths == "same" else tuple(pair)
        self.extra: dict[str, Tensor] = {}
        if bias in ("pre_scale_bias", "post_scale_bias"):
            self.extra["bias"] = leaf(1, HEADS, size_q, size_kv, dtype=dtype)
            self.given["core_attention_bias"] = self.extra["bias"]
        if bias != "no_bias":
            self.given["core_attention_bias_type"] = bias
        self.module = nc.DotProductAttention(
            HEADS,
            (DIM, dim_v),
            num_gqa_groups=groups,
            qkv_format=qkv_format,
            attn_mask_type=mask,
            window_size=window,
            softmax_type=softmax,
            **options,
        ).to("cpu")
        if softmax == "learnable":
            torch.nn.init.normal_(self.module.softmax_offset)
            self.extra["offset"] = self.module.softmax_offset

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.extra.values()]

    def run(self, forward: Any = None, **options: Any) -> list[Tensor]:
        """Output, and gradients of everything that has one."""
        out = (self.module if forward is None else forward)(self.q, self.k, self.v, **self.given, **options)
        largest = []
        if isinstance(out, tuple):
            out, logit = out
            largest = [logit]
        return [out, *largest, *self.gradients(out)]

    def gradients(self, out: Tensor) -> list[Tensor]:
        weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        return list(torch.autograd.grad((out.float() * weight).sum(), self.leaves()))

    def expected(self, score_mod: Any = None) -> list[Tensor]:
        """The same by the definition."""
        outs, logits, scale = [], [], DIM**-0.5
        sequences = zip(
            oracle.split(self.q, self.fmt, self.n_q),
            oracle.split(self.k, self.fmt, self.n_kv),
            oracle.split(self.v, self.fmt, self.n_kv),
        )
        offset = self.extra.get("offset")
        if self.module.softmax_type == "off-by-one":
            offset = torch.zeros(HEADS)
        for i, (q, k, v) in enumerate(sequences):
            bias = self.extra.get("bias")
            if bias is not None:
                bias = bias[0, :, : self.n_q[i], : self.n_kv[i]] * (scale if self.bias[1] == "r" else 1.0)
            out, logit = oracle.one_sequence(
                q,
                k,
                v,
                scale=scale,
                causal="causal" in self.mask,
                window=self.window or (-1, -1),
                bottom_right=self.mask not in ("causal", "padding_causal"),
                masked_out=None if self.masked_out is None else self.masked_out[i],
                bias=bias,
                slopes=torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(HEADS)])
                if self.bias == "alibi"
                else None,
                score_mod=score_mod,
                sink=None if offset is None else offset.flatten(),
            )
            outs.append(out)
            logits.append(logit)
        out = oracle.join(outs, self.fmt, self.q, self.n_q)
        largest = [torch.stack(logits).amax(0)] if self.module.return_max_logit else []
        return [out, *largest, *self.gradients(out)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 2e-6) -> None:
    assert len(ours) == len(theirs)
    for index, (a, b) in enumerate(zip(ours, theirs)):
        assert a.shape == b.shape, index
        error = (a.float() - b.float()).abs().max().item() if a.numel() else 0.0
        assert error <= tolerance * max(1.0, b.float().abs().max().item()), (index, error)


def rows() -> list[tuple[Any, ...]]:
    """Combinations that can meet, as many as hold every two values."""
    every = itertools.product(
        ["bshd", "sbhd", "thd"],
        MASKS,
        LENGTHS,
        [(HEADS, DIM), (2, DIM), (1, 12)],
        [None, (2, 1), (1, -1)],
        ["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"],
        ["vanilla", "off-by-one", "learnable"],
    )
    can = [
        row for row in every if row[0] != "thd" or ("padding" in row[1] and row[5] in ("no_bias", "alibi"))
    ]
    return [can[index] for index in covering(can)]


@pytest.mark.parametrize("qkv_format, mask, lengths, heads, window, bias, softmax", rows())
def test_every_configuration_against_its_definition(
    qkv_format: str,
    mask: str,
    lengths: str,
    heads: tuple[int, int],
    window: tuple[int, int] | None,
    bias: str,
    softmax: str,
) -> None:
    case = Case(qkv_format, mask, lengths, *heads, softmax=softmax, bias=bias, window=window)
    assert_equal(case.run(), case.expected())


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_sixteen_bits(mask: str, dtype: torch.dtype, tolerance: float) -> None:
    case = Case("bshd", mask, "same", dtype=dtype)
    assert_equal(case.run(), case.expected(), tolerance)


@pytest.mark.parametrize(
    "qkv_format, mask, options",
    [
        ("bshd", "causal", {}),
        ("sbhd", "padding_causal", {"softmax": "learnable", "groups": 2}),
        ("thd", "padding_causal", {"window": (2, 0)}),
        ("bshd", "arbitrary", {"bias": "post_scale_bias"}),
        ("thd", "padding", {"bias": "alibi", "return_max_logit": True}),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_compiled_is_eager(qkv_format: str, mask: str, options: dict[str, Any], again: bool) -> None:
    case = Case(qkv_format, mask, "same", **options)
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    eager = case.run(checkpoint_core_attention=again)
    assert_equal(case.run(compiled, checkpoint_core_attention=again), eager, 1e-6)
    assert_equal(eager, case.expected())


def test_the_largest_logit_of_each_head() -> None:
    case = Case("bshd", "causal", "same", return_max_logit=True)
    out, largest, *_ = case.run()
    assert out.shape == (2, 7, HEADS * DIM) and largest.shape == (HEADS,)
    assert_equal(case.run(), case.expected())
    module = nc.DotProductAttention(2, 8, qkv_format="bshd", return_max_logit=True)
    q = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    assert module(q, q, q)[1].dtype == torch.bfloat16  # that of the output, as Transformer Engine's


@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
def test_padding_between_packed_sequences(mask: str) -> None:
    lengths, begins, total = [3, 0, 4], [0, 5, 6, 12], 14
    q, k, v = (leaf(total, HEADS, DIM) for _ in range(3))
    module = nc.DotProductAttention(HEADS, DIM, qkv_format="thd", attn_mask_type=mask)
    cu, padded = cumulative(lengths), torch.tensor(begins, dtype=torch.int32)
    out = module(
        q,
        k,
        v,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        pad_between_seqs=True,
    )
    parts = [oracle.split(x, "thd", lengths, begins) for x in (q, k, v)]
    outs = [
        oracle.one_sequence(*part, scale=DIM**-0.5, causal="causal" in mask, bottom_right=True)[0]
        for part in zip(*parts)
    ]
    expected = oracle.join(outs, "thd", q, lengths, begins)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    assert_equal([out, *ours], [expected, *theirs])


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_packed_tensors_are_their_parts(qkv_format: str, dim: int) -> None:
    case = Case(qkv_format, "padding", "same")
    qkv = torch.stack((case.q, case.k, case.v), dim).detach().requires_grad_(True)
    out = case.module(qkv_layer=qkv, qkv_interleave_dim=dim, **case.given)
    expected = case.run()
    assert torch.equal(out, expected[0])
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (grad,) = torch.autograd.grad((out * weight).sum(), qkv)
    assert_equal(list(grad.unbind(dim)), expected[1:])
    kv = torch.stack((case.k, case.v), dim)
    assert torch.equal(case.module(case.q, kv_layer=kv, qkv_interleave_dim=dim, **case.given), expected[0])


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, cap: Tensor) -> Tensor:
    return cap * torch.tanh(score / cap) + 0.1 * (q - kv)


@pytest.mark.parametrize("qkv_format, mask", [("bshd", "no_mask"), ("sbhd", "causal"), ("thd", "padding")])
def test_a_function_of_the_scores(qkv_format: str, mask: str) -> None:
    case = Case(qkv_format, mask, "same")
    cap = torch.tensor(0.7)
    given = {"score_mod": soft_cap, "score_mod_tensors": {"cap": cap}}
    ours = case.run(**given)
    assert_equal(ours, case.expected(lambda score, h, q, kv: soft_cap(score, None, h, q, kv, cap)))
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    assert_equal(case.run(compiled, **given), ours, 1e-6)


def test_lengths_in_place_of_a_mask() -> None:
    case = Case("bshd", "padding_causal", "same")
    expected = case.run()
    case.given = {"cu_seqlens_q": cumulative(case.n_q), "cu_seqlens_kv": cumulative(case.n_kv)}
    assert_equal(case.run(), expected, 1e-6)


def test_the_call_overrides_the_module() -> None:
    case = Case("bshd", "no_mask", "same")
    expected = case.run()
    case.module = nc.DotProductAttention(HEADS, DIM, qkv_format="sbhd", window_size=(1, 0))
    ours = case.run(qkv_format="bshd", attn_mask_type="no_mask", window_size=(-1, -1))
    assert_equal(ours, expected, 1e-6)


class Tracker:
    """Counts forks; its random numbers are one generator's."""

    def __init__(self) -> None:
        self.states, self.forks = {"model-parallel-rng": torch.Generator().manual_seed(3).get_state()}, 0

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = states

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Any:
        self.forks += 1
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


@pytest.mark.parametrize("again", [False, True])
def test_dropout_runs_in_the_trackers_fork(again: bool) -> None:
    results = []
    for seed in (1, 2):  # of the outer numbers, which do not matter
        tracker = Tracker()
        torch.manual_seed(11)
        case = Case("bshd", "causal", "same", attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
        torch.manual_seed(seed)
        results.append(case.run(checkpoint_core_attention=again))
        assert tracker.forks == 1 + again
    assert_equal(results[0], results[1], 0.0)
    case.module.eval()
    assert_equal(case.run(), case.expected())
    assert not torch.allclose(results[0][0], case.run()[0])


def test_dropout_keeps_the_mean() -> None:
    module = nc.DotProductAttention(HEADS, DIM, attention_dropout=0.25, qkv_format="bshd")
    q, k = torch.randn(1, 64, HEADS, DIM), torch.randn(1, 64, HEADS, DIM)
    v = torch.ones(1, 64, HEADS, DIM)
    mean = torch.stack([module(q, k, v) for _ in range(8)]).mean()
    assert abs(mean - 1) < 0.05


def test_checkpointing_changes_nothing() -> None:
    case = Case("bshd", "causal", "same", attention_dropout=0.3)
    torch.manual_seed(5)
    plain = case.run()
    torch.manual_seed(5)
    assert_equal(case.run(checkpoint_core_attention=True), plain, 0.0)


@pytest.mark.parametrize("mask_type", ["no_mask", "padding_causal_bottom_right"])
def test_one_query_of_grouped_heads_repeats_no_key(mask_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step: the kernel is called with the keys as they are."""
    seen: list[tuple[int, ...]] = []
    run = sdpa.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.append((*q.shape[:3], *k.shape[:3]))
        return run(q, k, *arguments, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    attention = nc.DotProductAttention(6, 4, 2, qkv_format="bshd", attn_mask_type=mask_type)
    q, k, v = torch.randn(3, 1, 6, 4), torch.randn(3, 5, 2, 4), torch.randn(3, 5, 2, 4)
    cu = (torch.tensor([0, 1, 1, 2]), torch.tensor([0, 5, 8, 10]))
    given = (
        {} if mask_type == "no_mask" else dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), (c.int() for c in cu)))
    )
    out = attention(q, k, v, **given)
    assert seen == [(3, 2, 3, 3, 2, 5)]
    for row, (queries, keys) in enumerate(((1, 5), (0, 3), (1, 2)) if given else ((1, 5),) * 3):
        for head in range(6):
            weights = (k[row, :keys, head // 3] @ q[row, 0, head] / 2).softmax(0)
            expected = weights @ v[row, :keys, head // 3] * queries
            assert_close(out[row, 0, 4 * head : 4 * head + 4], expected, "fp32_layer")


@pytest.mark.parametrize("qkv_format, mask", [("bshd", "causal"), ("thd", "padding_causal")])
def test_one_graph_for_all_lengths(qkv_format: str, mask: str) -> None:
    module = nc.DotProductAttention(HEADS, DIM, qkv_format=qkv_format, attn_mask_type=mask)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(module, fullgraph=True, backend=counter, dynamic=True), []
    for n in (6, 9, 13):
        q, k, v = (leaf(*((2, n) if qkv_format == "bshd" else (2 * n,)), HEADS, DIM) for _ in range(3))
        cu = cumulative([n, n - 1])
        given = {} if qkv_format == "bshd" else {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        out = compiled(q, k, v, **given)
        out.sum().backward()
        assert_equal([out], [module(q, k, v, **given)], 1e-6)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


def test_a_tracker_stays_out_of_graphs() -> None:
    tracker = nc.CudaRNGStatesTracker("cpu")
    tracker.add("model-parallel-rng", 3)
    case = Case("bshd", "causal", "same", attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    with pytest.raises(RuntimeError, match=r"CudaRNGStatesTracker\.fork"):
        case.run(torch.compile(case.module, fullgraph=True, backend="aot_eager"))
    states = tracker.get_states()
    eager = case.run()
    tracker.set_states(states)
    assert_equal(case.run(torch.compile(case.module, backend="aot_eager")), eager, 0.0)


WINDOWS = (None, (-1, -1), (-1, 0), (0, 0), (1, -1), (2, 1), (0, -1), (-1, 1))


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["chosen", "sdpa", "unfused"])
@pytest.mark.parametrize("size_q", [1, 2, 5])
@pytest.mark.parametrize("size_kv", [1, 2, 5])
def test_few_queries_and_few_keys(
    size_q: int, size_kv: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mask, window and diagonal, where one query or one key makes them meet."""
    if backend != "chosen":
        monkeypatch.setattr("narrowcast.attention.core.choose_backend", lambda facts, switches: backend)
    wrong = []
    for mask, window, bottom_right, groups in itertools.product(
        ("no_mask", "causal", "causal_bottom_right"), WINDOWS, (None, False, True), (HEADS, 2)
    ):
        module = nc.DotProductAttention(
            HEADS, DIM, groups, qkv_format="bshd", attn_mask_type=mask, window_size=window
        )
        q, k, v = leaf(2, size_q, HEADS, DIM), leaf(2, size_kv, groups, DIM), leaf(2, size_kv, groups, DIM)
        out = module(q, k, v, bottom_right_diagonal=bottom_right)
        diagonal = mask != "causal" if bottom_right is None else bottom_right
        rows = [
            oracle.one_sequence(
                *(x[row].transpose(0, 1) for x in (q, k, v)),
                scale=DIM**-0.5,
                causal="causal" in mask,
                window=window or (-1, -1),
                bottom_right=diagonal,
            )[0]
            for row in range(2)
        ]
        expected = oracle.join(rows, "bshd", q, [size_q] * 2)
        weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
        theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
        error = max((a - b).abs().max().item() for a, b in zip((out, *ours), (expected, *theirs)))
        if error > 4e-6:
            wrong.append((mask, window, bottom_right, groups, error))
    assert wrong == []


@pytest.mark.parametrize("max_logit", [False, True])
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one"])
def test_no_query_attends_to_nothing(softmax: str, max_logit: bool) -> None:
    module = nc.DotProductAttention(
        2, 8, qkv_format="bshd", attn_mask_type="no_mask", softmax_type=softmax, return_max_logit=max_logit
    )
    q, k, v = (torch.randn(2, n, 2, 8, requires_grad=True) for n in (0, 3, 3))
    out = module(q, k, v)
    if max_logit:
        out, largest = out
        assert torch.equal(largest, torch.full((2,), float("-inf")))
    assert out.shape == (2, 0, 16)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient.any()


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_sequences_may_have_slopes_of_their_own(qkv_format: str) -> None:
    lengths, slopes = ([5, 5] if qkv_format == "bshd" else [5, 3]), torch.rand(2, HEADS)
    q, k, v = (torch.randn(sum(lengths), HEADS, DIM) for _ in range(3))
    mask = "causal" if qkv_format == "bshd" else "padding_causal"
    module = nc.DotProductAttention(HEADS, DIM, qkv_format=qkv_format, attn_mask_type=mask)
    options: dict[str, Any] = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    if qkv_format == "thd":
        cu = cumulative(lengths)
        out = module(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, **options)
    else:
        out = module(*(x.unflatten(0, (2, 5)) for x in (q, k, v)), **options).flatten(0, 1)
    parts = zip(*(oracle.split(x, "thd", lengths) for x in (q, k, v)), slopes)
    expected = [
        oracle.one_sequence(*part, scale=DIM**-0.5, causal=True, slopes=own)[0] for *part, own in parts
    ]
    assert_equal([out], [oracle.join(expected, "thd", q, lengths)])


def test_switches_choose_among_pytorch_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[Any] = []
    run = sdpa.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, scores: Any, kernels: Any, *flags: bool) -> Tensor:
        allowed.append(kernels)
        return run(q, k, v, scores, kernels, *flags)

    monkeypatch.setattr(sdpa, "attend", attend)
    x = torch.randn(2, 5, HEADS, DIM)
    nc.DotProductAttention(HEADS, DIM, qkv_format="bshd")(x, x, x)
    monkeypatch.setenv("NARROWCAST_FLASH_ATTN", "0")
    nc.DotProductAttention(HEADS, DIM, qkv_format="bshd")(x, x, x)
    assert allowed[0] is None
    assert SDPBackend.MATH in allowed[1] and SDPBackend.FLASH_ATTENTION not in allowed[1]


@pytest.mark.parametrize(
    ("mask", "lengths", "bias", "expected"),
    [
        ("no_mask", "same", "no_bias", "none"),
        ("causal", "same", "no_bias", "causal"),
        ("causal", "same", "post_scale_bias", "pairs"),
        ("causal_bottom_right", "fewer queries", "no_bias", "pairs"),
        ("arbitrary", "same", "no_bias", "tensor"),
        ("padding", "same", "no_bias", "pairs"),
    ],
)
def test_what_the_choice_of_a_backend_sees_of_a_mask(
    mask: str, lengths: str, bias: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    choose = core.choose_backend
    monkeypatch.setattr(
        core, "choose_backend", lambda facts, switches: seen.append(facts) or choose(facts, switches)
    )
    Case("bshd", mask, lengths, bias=bias).run()
    assert {facts.mask for facts in seen} == {expected}
