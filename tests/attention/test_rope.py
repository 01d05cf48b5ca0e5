"""Rotary embeddings against complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc


def turned(t: Tensor, positions: Tensor, channels: int, interleaved: bool) -> Tensor:
    """Each token (n, h, d) turned as complex numbers in double precision."""
    x = t.detach().double()
    first = torch.arange(0, channels, 2) if interleaved else torch.arange(channels // 2)
    second = first + 1 if interleaved else first + channels // 2
    angles = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, channels, 2).double() / channels)
    z = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angles)[:, None]
    out = x.clone()
    out[..., first], out[..., second] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("started", [False, True])
def test_against_complex_numbers(fmt: str, percent: float, interleaved: bool, started: bool) -> None:
    s, h, d = 6, 2, 8
    lengths = [4, 2] if fmt == "thd" else [s, s]
    t = torch.randn(*{"bshd": (2, s, h, d), "sbhd": (s, 2, h, d), "thd": (s, h, d)}[fmt], requires_grad=True)
    rope = nc.RotaryPositionEmbedding(d, percent, interleaved=interleaved).to("cpu", torch.bfloat16)
    starts = torch.tensor([3, 1], dtype=torch.int32) if started else None
    cu = torch.tensor([0, 4, 6], dtype=torch.int32) if fmt == "thd" else None
    options = {"start_positions": starts, "cu_seqlens": cu, "interleaved": interleaved}
    out = nc.apply_rotary_pos_emb(t, rope(9), fmt, **options)
    rows = list(t.split(lengths)) if fmt == "thd" else list(t.unbind(fmt.index("b")))
    expected = [
        turned(row, torch.arange(n) + (0 if starts is None else starts[i]), int(d * percent), interleaved)
        for i, (row, n) in enumerate(zip(rows, lengths))
    ]
    whole = torch.cat(expected) if fmt == "thd" else torch.stack(expected, fmt.index("b"))
    torch.testing.assert_close(out.double(), whole, atol=1e-5, rtol=0)
    # turning back is the gradient
    (grad,) = torch.autograd.grad(out, t, out.detach())
    torch.testing.assert_close(grad, t.detach(), atol=1e-5, rtol=0)
    if percent < 1 and started:
        compiled = torch.compile(nc.apply_rotary_pos_emb, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(t, rope(9), fmt, **options), out)


def test_the_angles() -> None:
    rope = nc.RotaryPositionEmbedding(4).to("cpu")
    angles = rope(3, offset=2)
    assert angles.shape == (3, 1, 1, 4) and angles.dtype == torch.float32
    torch.testing.assert_close(angles[:, 0, 0, :2], torch.tensor([[2.0, 0.02], [3.0, 0.03], [4.0, 0.04]]))
    assert torch.equal(angles[..., :2], angles[..., 2:])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rope(3, offset=2), angles)


def test_interpolation() -> None:
    plain = nc.RotaryPositionEmbedding(4).to("cpu")(12)
    halved = nc.RotaryPositionEmbedding(4, seq_len_interpolation_factor=2).to("cpu")
    torch.testing.assert_close(halved(12), plain / 2)
    dynamic = nc.RotaryPositionEmbedding(
        4, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=4
    ).to("cpu")
    torch.testing.assert_close(dynamic(8), plain[:8] / 2)
    torch.testing.assert_close(dynamic(12), plain / 3)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
def test_context_parallel_ranks_hold_two_chunks(fmt: str) -> None:
    freqs = nc.RotaryPositionEmbedding(8).to("cpu")(16)
    lengths = [8, 16] if fmt == "thd" else [16, 16]
    rows = [torch.randn(n, 2, 8) for n in lengths]
    dim = 0 if fmt == "thd" else fmt.index("b")

    def whole(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if fmt == "thd" else torch.stack(parts, dim)

    cu = torch.tensor([0, 8, 24], dtype=torch.int32) if fmt == "thd" else None
    full = nc.apply_rotary_pos_emb(whole(rows), freqs, fmt, cu_seqlens=cu)
    split = list(full.split(lengths)) if fmt == "thd" else list(full.unbind(dim))
    for rank in range(2):
        mine = [torch.cat((row.chunk(4)[rank], row.chunk(4)[3 - rank])) for row in rows]
        ours = nc.apply_rotary_pos_emb(whole(mine), freqs, fmt, cu_seqlens=cu, cp_size=2, cp_rank=rank)
        expected = [torch.cat((row.chunk(4)[rank], row.chunk(4)[3 - rank])) for row in split]
        assert torch.equal(ours, whole(expected))


def test_what_does_not_fit_is_refused() -> None:
    t, freqs = torch.randn(6, 2, 2, 8), nc.RotaryPositionEmbedding(8).to("cpu")(6)
    apply = nc.apply_rotary_pos_emb
    with pytest.raises(ValueError, match="tensor_format"):
        apply(t, freqs, "bhsd")
    with pytest.raises(
        ValueError,
        match=r"^t has shape \(6, 8\); tensor_format='sbhd' takes 4 dims: sequence, batch, heads, head dim$",
    ):
        apply(t[:, 0, 0], freqs)
    with pytest.raises(ValueError, match="cu_seqlens"):
        apply(t[:, 0], freqs, "thd")
    with pytest.raises(ValueError, match="6 positions and freqs angles for 5"):
        apply(t, freqs[:5])
    with pytest.raises(ValueError, match="start_positions"):
        apply(t, freqs, start_positions=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="position 6"):
        apply(t, freqs, start_positions=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="cp_rank"):
        apply(t, freqs, cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="even number"):
        nc.RotaryPositionEmbedding(7)
    with pytest.raises(TypeError, match="^pretrained_max_position_embeddings is 'x', of type str"):
        nc.RotaryPositionEmbedding(8, pretrained_max_position_embeddings="x")
    for given, told in (
        (("8",), "^max_seq_len is '8', of type str; use a whole number"),
        ((8, None), "^offset is None, of type NoneType; use a whole number"),
    ):
        with pytest.raises(TypeError, match=told):
            nc.RotaryPositionEmbedding(8)(*given)
    with pytest.raises(ValueError, match="^max_seq_len is -1; use the number of positions"):
        nc.RotaryPositionEmbedding(8)(-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_is_unfused(fmt: str, started: bool, interleaved: bool, dtype: torch.dtype) -> None:
    h, d = 3, 10
    shape = {"bshd": (2, 6, h, d), "sbhd": (6, 2, h, d), "thd": (6, h, d)}[fmt]
    t = torch.randn(shape).to(dtype).requires_grad_(True)
    freqs = nc.RotaryPositionEmbedding(d, 0.8, interleaved=interleaved).to("cpu")(9)
    options = {
        "start_positions": torch.tensor([3, 1], dtype=torch.int32) if started else None,
        "cu_seqlens": torch.tensor([0, 4, 6], dtype=torch.int32) if fmt == "thd" else None,
        "interleaved": interleaved,
    }
    results = []
    for fused in (False, True):
        out = nc.apply_rotary_pos_emb(t, freqs, fmt, fused=fused, **options)
        results.append((out, *torch.autograd.grad(out, t, torch.arange(t.numel()).reshape(shape).to(dtype))))
    for unfused, fused in zip(*results):
        assert torch.equal(unfused, fused)


@pytest.mark.parametrize(
    ("fmt", "by_group"), [("bshd", True), ("bshd", False), ("sbhd", True), ("thd", False)]
)
def test_a_packed_tensor_is_its_parts(fmt: str, by_group: bool) -> None:
    g, d, dim_v, heads = 2, 8, 6, 3
    lead = {"bshd": (2, 6), "sbhd": (6, 2), "thd": (6,)}[fmt]
    qkv = torch.randn(*lead, g, heads * d + d + dim_v, requires_grad=True)
    freqs = [nc.RotaryPositionEmbedding(d, share).to("cpu")(9) for share in (1.0, 0.5)]
    options = {"cu_seqlens": torch.tensor([0, 4, 6], dtype=torch.int32)} if fmt == "thd" else {}
    options["start_positions"] = torch.tensor([3, 1], dtype=torch.int32)
    widths = [heads * d, d, dim_v]
    ours = nc.apply_fused_qkv_rotary_pos_emb(qkv, *freqs, widths, fmt, **options, by_group=by_group)
    if by_group:
        q, k, v = qkv.split(widths, -1)
        q = q.unflatten(-1, (heads, d)).flatten(-3, -2)
    else:
        parts = qkv.flatten(-2).split([g * width for width in widths], -1)
        q, k, v = (part.unflatten(-1, (-1, width)) for part, width in zip(parts, (d, d, dim_v)))
    expected = [nc.apply_rotary_pos_emb(x, f, fmt, **options) for x, f in zip((q, k), freqs)] + [v]
    for a, b in zip(ours, expected):
        assert torch.equal(a, b)
    weights = [torch.randn_like(x) for x in ours]
    assert torch.equal(
        *(
            torch.autograd.grad(sum((a * w).sum() for a, w in zip(x, weights)), qkv)[0]
            for x in (ours, expected)
        )
    )


def test_fused_compiles() -> None:
    qkv, freqs = torch.randn(2, 6, 2, 24), nc.RotaryPositionEmbedding(8).to("cpu")(6)

    def both(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = nc.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [8, 8, 8], "bshd")
        return nc.apply_rotary_pos_emb(q, freqs, "bshd", fused=True), k, v

    compiled, results = torch.compile(both, fullgraph=True, backend="aot_eager"), []
    for run in (both, compiled):
        x = qkv.clone().requires_grad_(True)
        out = run(x)
        sum(part.square().sum() * (i + 1) for i, part in enumerate(out)).backward()
        results.append([*out, x.grad])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_packed_tensors_that_do_not_fit_are_refused() -> None:
    qkv, freqs = torch.randn(6, 2, 2, 24), nc.RotaryPositionEmbedding(8).to("cpu")(6)
    apply = nc.apply_fused_qkv_rotary_pos_emb
    with pytest.raises(ValueError, match="qkv_split_arg_list"):
        apply(qkv, freqs, freqs, [8, 8, 4])
    with pytest.raises(ValueError, match="multiple"):
        apply(qkv, freqs, freqs, [12, 8, 4])
    with pytest.raises(ValueError, match="contiguous"):
        apply(qkv.transpose(0, 1), freqs, freqs, [8, 8, 8])
    with pytest.raises(ValueError, match="tensor_format"):
        apply(qkv, freqs, freqs, [8, 8, 8], "hbsd")
