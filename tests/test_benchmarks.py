"""The benchmarks on a CPU: they import, their arithmetic holds, their peers are right, the plot is drawn."""

from __future__ import annotations

import csv
import importlib
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowcast import functional, reference
from narrowcast.testing import assert_close

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHAPE = (512, 1024)
NEEDS = {"plot": "matplotlib", "bench_moments": "rich", "bench_train": "rich"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks' folder on the path, as when one of them is run, and its modules forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {path.stem for path in BENCHMARKS.iterdir()}:
            del sys.modules[name]


def benchmark(name: str) -> Any:
    return importlib.import_module(name)


def differing_bytes(actual: Tensor, expected: Tensor) -> int:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    return int((actual.flatten().view(torch.uint8) != expected.flatten().view(torch.uint8)).sum())


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_benchmark_imports(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert callable(getattr(benchmark(name), "fused_table" if name == "producers" else "main"))


def test_summarize_gives_shares_and_ratios() -> None:
    harness = benchmark("harness")
    shape = harness.Shape("made up", 1000, 1000)
    # A copy of 4 bytes per element in 2 us moves 2 TB/s; 6 bytes in 4 us are 1.5 TB/s.
    sizes = {"copy": 4.0, "fp8 current": 6.0, "torch.compile: fp8 current": 6.0, "fp8 other": 4.0}
    times = {
        "copy": [2.0, 2.0, 2.0, 2.0, 9.0],
        "fp8 current": [3.0, 3.5, 4.0, 4.5, 5.0],
        "torch.compile: fp8 current": [10.0] * 5,
        "fp8 other": [4.0] * 5,
    }
    copy, kernel, peer, other = harness.summarize(shape, sizes, times)
    assert (copy["TB/s"], copy["share"]) == (2.0, 1.0)
    assert (kernel["us_p20"], kernel["us_p50"], kernel["us_p80"]) == (3.4, 4.0, 4.6)
    assert (kernel["TB/s"], kernel["share"], kernel["vs_compiled"]) == (1.5, 0.75, 2.5)
    assert (peer["share"], peer["vs_compiled"]) == (0.3, "")
    assert (other["share"], other["vs_compiled"]) == (0.5, "")
    assert (kernel["name"], kernel["shape"]) == ("made up", "1000x1000")
    assert "vs_torchao" not in kernel


def test_turns_change_their_order_and_the_first_is_not_counted() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in ("old", "new")}
    found = benchmark("harness").by_turns(runs, 2)
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert found == {"old": [4, 5], "new": [3, 6]}


def test_measure_takes_turns_around_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = benchmark("harness")
    monkeypatch.setattr(benchmark("harness.contenders"), "ring", lambda make: [make() for _ in range(3)])
    seen: list[tuple[str, int]] = []
    made = iter(range(3))

    def inputs(shape: Any) -> tuple[Tensor, int]:
        return torch.ones(shape.rows, shape.columns), next(made)

    table = {
        "kernel a": (lambda x, index: seen.append(("a", index)), 4.0),
        "kernel b": (lambda x, index: seen.append(("b", index)), 4.0),
        "left out": (lambda x, index: seen.append(("left out", index)), 4.0),
    }
    chosen = Namespace(device="cpu", repeats=2, shapes=1, only="kernel")
    rows = harness.measure(
        chosen, (harness.Shape("tiny", 4, 4), harness.Shape("not asked for", 8, 8)), inputs, table
    )
    assert [row["kernel"] for row in rows] == ["copy", "kernel a", "kernel b"]
    assert {row["shape"] for row in rows} == {"4x4"}
    assert rows[0]["bytes"] == 8.0, "a copy of fp32 reads four bytes and writes four"
    # Every turn is four launches, and the ring goes on from one contender to the next; the copy took the first four.
    assert seen[:8] == [("a", 1), ("a", 2), ("a", 0), ("a", 1), ("b", 2), ("b", 0), ("b", 1), ("b", 2)]
    assert len(seen) == 2 * 4 * (2 + 2)


def test_a_ring_is_larger_than_the_cache() -> None:
    harness = benchmark("harness")
    assert len(harness.ring(lambda: (torch.empty(25),), size=1000)) == 10
    assert len(harness.ring(lambda: (torch.empty(1000),), size=1000)) == 2


def test_appended_rows_may_have_new_columns(tmp_path: Path) -> None:
    append, path = benchmark("harness").append, tmp_path / "results" / "made_up.csv"
    append(path, [{"kernel": "a", "share": 0.5}])
    append(path, [{"kernel": "b", "share": 0.25, "vs_compiled": 2}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"kernel": "a", "share": "0.5", "vs_compiled": ""},
        {"kernel": "b", "share": "0.25", "vs_compiled": "2"},
    ]


def test_quantize_expressions_equal_the_reference() -> None:
    """A peer that computes something else would be compared for nothing."""
    bench = benchmark("bench_quantize")
    (x,) = bench.random_input(SHAPE)
    expected = bench.kernel_table(reference, "cpu")
    expressions = bench.expression_table("cpu")
    assert set(expected) - set(expressions) == {"nvfp4 RHT + SR"}
    for name, (run, size) in expressions.items():
        outputs, wanted = run(x), expected[name][0](x)
        assert size == expected[name][1]
        assert len(outputs) - len(wanted) == (1 if "amax" in name else 0), name
        # The rotation is a matrix product, whose sums may be rounded in another order.
        allowed = x.numel() // 1000 if "RHT" in name else 0
        differing = [differing_bytes(a, b) for a, b in zip(outputs, wanted)]
        assert sum(differing) <= allowed, f"{name}: bytes that differ, per buffer: {differing}"


def test_given_scale_expression_raises_the_amax() -> None:
    (x,) = benchmark("bench_quantize").random_input(SHAPE)
    given_scale = benchmark("peers.expressions").given_scale
    largest = x.abs().max().float()
    assert given_scale(x, torch.ones(1), torch.zeros(1))[-1] == largest
    assert given_scale(x, torch.ones(1), torch.full((1,), 100.0))[-1] == 100.0


def test_dequantize_expressions_equal_the_operator() -> None:
    bench = benchmark("bench_dequantize")
    arguments = bench.encoded_input(SHAPE)
    for name, (run, _) in bench.operator_table().items():
        expected = run(*arguments)[0]
        actual = bench.expression_table()[name][0](*arguments)
        assert differing_bytes(actual, expected) == 0, name


def test_transpose_expression_equals_the_reference() -> None:
    bench = benchmark("bench_transpose")
    (data,) = bench.random_codes((7, 12))
    assert differing_bytes(bench.expression(data), reference.float8.transpose(data)) == 0


def test_moe_expressions_equal_the_reference() -> None:
    bench = benchmark("bench_moe")
    arguments, expected = bench.routed((24, 32)), bench.kernel_table(bench.REFERENCE)
    for name, (run, _) in bench.expression_table().items():
        outputs = zip(run(*arguments), expected[name][0](*arguments), strict=True)
        for index, (actual, wanted) in enumerate(outputs):
            # the sum over a row is in another order than the reference's
            assert_close(actual, wanted, "fp32_sum_order" if index else "exact")
    by_mask = expected["collect, mask"][0](*arguments)[0]
    assert differing_bytes(by_mask, expected["collect"][0](*arguments)[0]) == 0


def test_rotary_expression_equals_the_reference() -> None:
    bench = benchmark("bench_rope")
    x, cos, sin = bench.random_queries((7, 256))
    assert torch.equal(bench.expression(x, cos, sin), reference.rope.rotate(x, cos, sin, None, False, False))


def test_delayed_scaling_contenders_equal_the_reference() -> None:
    benchmark("bench_delayed_scaling").check("cpu")


def test_swiglu_expressions_are_swiglu_and_its_gradient() -> None:
    bench = benchmark("bench_activation")
    x, grad = bench.backward_input((64, 96))
    exact = x.double().requires_grad_()
    a, b = exact.chunk(2, -1)
    y = torch.nn.functional.silu(a) * b
    (dx_exact,) = torch.autograd.grad(y, exact, grad.double())
    torch.testing.assert_close(bench.swiglu(x)[0].double(), y.detach(), rtol=1e-2, atol=1e-3)
    dx, dbias = bench.swiglu_backward(x, grad)
    torch.testing.assert_close(dx.double(), dx_exact, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(dbias.double(), dx_exact.sum(0), rtol=1e-2, atol=0.1)


def test_norm_expressions_are_rmsnorm_and_its_gradients() -> None:
    bench = benchmark("bench_norm")
    x, weight, grad, rstd = bench.backward_input((64, 96))
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = torch.nn.functional.rms_norm(exact, (96,), exact_weight, bench.EPS)
    y.backward(grad.double())
    torch.testing.assert_close(bench.rmsnorm(x, weight)[0].double(), y.detach(), rtol=1e-2, atol=1e-3)
    dx, dweight = bench.rmsnorm_backward(x, weight, grad, rstd)
    torch.testing.assert_close(dx.double(), exact.grad, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(dweight.double(), exact_weight.grad, rtol=1e-2, atol=2e-2)
    summed = bench.add_rmsnorm(x, weight, grad)
    assert torch.equal(summed[-1], x + grad)
    assert torch.equal(summed[0], bench.rmsnorm(x + grad, weight)[0])


@pytest.mark.parametrize("module, tables", [("bench_activation", 2), ("bench_norm", 3)])
def test_fused_operators_equal_the_unfused(module: str, tables: int) -> None:
    bench, producers = benchmark(module), benchmark("producers")
    groups = {
        "bench_activation": lambda: (
            (bench.FORWARD, bench.forward_input),
            (bench.BACKWARD, bench.backward_input),
        ),
        "bench_norm": lambda: (
            (bench.PLAIN, bench.plain_input),
            (bench.RESIDUAL, bench.residual_input),
            (bench.BACKWARD, bench.backward_input),
        ),
    }[module]()
    assert len(groups) == tables
    for group, make in groups:
        inputs = make((32, 64))
        peers = producers.peer_table(group, "cpu", compile_too=False)
        for name, (run, size) in producers.fused_table(group, "cpu").items():
            unfused, same_size = peers[f"unfused: {name}"]
            assert size == same_size
            for index, (a, b) in enumerate(zip(run(*inputs), unfused(*inputs))):
                assert differing_bytes(a, b) == 0, f"{name}: output {index}"


def test_absent_operators_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, producers = benchmark("bench_activation"), benchmark("producers")
    for name in ("act", "act_quantize"):
        monkeypatch.delattr(functional, name, raising=False)
    assert producers.fused_table(bench.FORWARD, "cpu") == {}
    assert not [
        name for name in producers.peer_table(bench.FORWARD, "cpu", compile_too=False) if "unfused" in name
    ]
    assert "narrowcast.functional has no act_quantize" in capsys.readouterr().out


def test_bytes_are_those_of_the_least_traffic() -> None:
    bench, norm = benchmark("bench_activation"), benchmark("bench_norm")
    formats = benchmark("producers").formats("cpu")
    given, current = formats["fp8 given scale"], formats["fp8 current"]
    cases = (
        (bench.FORWARD["swiglu"], 6, 10),
        (bench.BACKWARD["dswiglu"], 10, 16),
        (norm.PLAIN["rmsnorm"], 4, 6),
        (norm.RESIDUAL["add+rmsnorm"], 8, 10),
        (norm.BACKWARD["drmsnorm"], 6, 10),
    )
    for producer, one_pass, two_passes in cases:
        assert producer.bytes_per_element(given) == one_pass
        assert producer.bytes_per_element(current) == two_passes


def test_plot_of_the_kept_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = benchmark("harness.plot").plot
    drawn = []
    for path in sorted((BENCHMARKS / "results").glob("*.csv")):
        shutil.copy(path, tmp_path)
        picture = plot(tmp_path / path.name)
        if picture is not None:
            assert "shorter is better" in picture.read_text()
            assert (tmp_path / f"{path.stem}-dark.svg").exists()
            drawn.append(path.stem)
    assert drawn == ["activation", "norm", "quantize"]


def test_plot_takes_the_newest_commit_and_shape_and_the_last_of_equal_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    harness, plot = benchmark("harness"), benchmark("harness.plot")
    where = {"device": "made up", "torch": "2", "triton": "3", "narrowcast": "0.1.0", "name": "n"}
    rows = [
        ("old", "4x4", "mxfp8", 1.0),
        ("new", "8x8", "mxfp8", 9.0),
        ("new", "4x4", "copy", 5.0),
        ("new", "4x4", "mxfp8", 2.0),
        ("new", "4x4", "torchao: mxfp8", 3.0),
        ("new", "4x4", "mxfp8", 4.0),
    ]
    path = tmp_path / "quantize.csv"
    harness.append(
        path,
        [
            {
                "shape": shape,
                "kernel": k,
                **dict.fromkeys(("us_p50", "us_p20", "us_p80"), us),
                "share": 0.5,
                "commit": c,
                **where,
            }
            for c, shape, k, us in rows
        ],
    )
    assert [(row["kernel"], row["us_p50"]) for row in plot.newest(path)] == [
        ("copy", "5.0"),
        ("mxfp8", "4.0"),
        ("torchao: mxfp8", "3.0"),
    ]
    assert plot.plot(path) == tmp_path / "quantize-light.svg"
    harness.append(tmp_path / "train.csv", [{"recipe": "bf16", "loss": 1.0}])
    assert plot.plot(tmp_path / "train.csv") is None


def test_plot_tells_peers_from_kernels() -> None:
    pytest.importorskip("matplotlib")
    plot = benchmark("harness.plot")
    assert plot.split_peer("torchao: fp8 current") == ("torchao", "fp8 current")
    assert plot.split_peer("fp8 current") == ("", "fp8 current")


def test_streams_tell_what_waits() -> None:
    streams = benchmark("harness.streams")
    ran = [
        ("nvjet_sm90_tst", 7, 0, 100),
        ("nvjet_sm90_tst", 7, 100, 150),  # beside an exchange
        ("ncclDevKernel_SendRecv", 9, 110, 90),
        ("_reduction_rank_sum_kernel", 9, 255, 20),  # while nothing is computed
        ("_adam_step_kernel", 7, 280, 200),
    ]
    events: list[dict[str, Any]] = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 900}]
    events += [
        {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": took, "args": {"stream": stream}}
        for name, stream, start, took in ran
    ]
    lines = streams.lines_of(streams.kernels_of(events), most=2)
    assert lines[0] == "   span 0.5 ms: computing stream 0.5, others alone 0.0, nothing 0.0"
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "computing: GEMM 0.25 ms x2 beside 0.05",
        "computing: optimizer 0.20 ms x1 beside 0.00",
        "others: NCCL, reduction 0.09 ms x1 alone 0.00",
        "others: sums of gradients 0.02 ms x1 alone 0.02",
        "waits 0.03 ms at 0.2 before optimizer: sums of gradients 0.02",
        "0.25 ms x2 longest 0.15 nvjet_sm90_tst",
        "0.20 ms x1 longest 0.20 _adam_step_kernel",
    ]
