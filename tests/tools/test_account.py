"""`narrowcast bench account`: kernels of a trace by phase and group, floors, and what is printed, written and drawn."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._dynamo.testing import CompileCounter

from narrowcast_tools import cli
from narrowcast_tools.bench.account import (
    GROUPS,
    Account,
    Ceilings,
    Kernel,
    Row,
    group_kernels,
    group_of,
    read_kernels,
    take_account,
)
from narrowcast_tools.bench.account_show import account_figure, account_table, draw_account, write_account
from narrowcast_tools.bench.asked import MODELS, TINY, Work
from narrowcast_tools.bench.measure import Contender
from narrowcast_tools.bench.works import OPTIMIZERS, build, phases_of

BF16, FP8 = "c10::BFloat16", "c10::Float8_e4m3fn"
CEILINGS = Ceilings(copy=1e12, bf16=1e12, fp8=2e12)


def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def operator(number: int, name: str, ts: float, dims: list[Any], kinds: list[str]) -> dict[str, Any]:
    args = {"External id": number, "Input Dims": dims, "Input type": kinds}
    return event("cpu_op", name, ts, 5, **args)


def trace() -> list[dict[str, Any]]:
    """A step of three operators; the product launches two kernels, the optimizer's has no shapes."""
    return [
        event("user_annotation", "forward", 0, 100),
        event("user_annotation", "backward", 100, 100),
        event("user_annotation", "optimizer", 200, 100),
        operator(1, "aten::_scaled_mm", 10, [[64, 32], [32, 48], [1], []], [FP8, FP8, "float", "Scalar"]),
        operator(2, "norm_kernel_3", 110, [[64, 32]], [BF16]),
        operator(3, "aten::_fused_adamw_", 210, [[[8]]], ["TensorList"]),
        event("cuda_runtime", "cudaLaunchKernel", 11, 1, correlation=11),
        event("cuda_runtime", "cudaMemsetAsync", 12, 1, correlation=12),
        event("cuda_driver", "cuLaunchKernel", 112, 1, correlation=13),
        event("cuda_runtime", "cudaLaunchKernel", 212, 1, correlation=14),
        event("gpu_memset", "Memset (Device)", 400, 2, correlation=12, **{"External id": 1}),
        event("kernel", "nvjet_qqtst", 402, 30, correlation=11, **{"External id": 1}),
        event("kernel", "norm_kernel", 440, 20, correlation=13, **{"External id": 2}),
        event("kernel", "multi_tensor_apply_kernel", 470, 10, correlation=14, **{"External id": 3}),
        {"ph": "M", "name": "process_name", "args": {}},
    ]


def test_a_kernel_has_the_phase_that_launched_it_and_shapes_once_per_operator() -> None:
    kernels = {kernel.name: kernel for kernel in read_kernels(trace())}
    product = kernels["nvjet_qqtst"]
    assert product == Kernel(
        "nvjet_qqtst", "aten::_scaled_mm", "forward", 0.03, (((64, 32), 1), ((32, 48), 1), ((1,), 4))
    )
    assert kernels["Memset (Device)"].shapes == ()  # or the product's work would count twice
    assert (kernels["norm_kernel"].phase, kernels["norm_kernel"].shapes) == ("backward", (((64, 32), 2),))
    assert (kernels["multi_tensor_apply_kernel"].phase, kernels["multi_tensor_apply_kernel"].shapes) == (
        "optimizer",
        (),
    )


def gemm(phase: str, a: tuple[int, int], b: tuple[int, int]) -> Kernel:
    return Kernel("nvjet_tst", "aten::mm.out", phase, 1.0, ((a, 2), (b, 2)))


@pytest.mark.parametrize(
    "kernel, group",
    [
        (gemm("forward", (64, 32), (32, 48)), "GEMM, fprop"),
        (gemm("forward", (64, 64), (64, 48)), "GEMM, fprop"),  # as many features as tokens
        (gemm("backward", (64, 48), (48, 32)), "GEMM, dgrad"),
        (gemm("backward", (48, 64), (64, 32)), "GEMM, wgrad"),
        (gemm("forward", (64, 32), (32, 32000)), "head and loss"),
        (Kernel("_float8_cast_tile_kernel", "", "forward", 1.0, (((32000, 32), 2),)), "head and loss"),
        (Kernel("fmha_reduce", "aten::_cudnn_attention_backward", "backward", 1.0, ()), "attention"),
        (Kernel("_float8_cast_tile_kernel", "_float8_cast_tile_kernel_0", "forward", 1.0, ()), "casts"),
        (Kernel("_norm_backward_kernel", "_norm_backward_kernel_7", "backward", 1.0, ()), "norms"),
        (Kernel("triton_poi_fused_mul_silu_split_5", "", "forward", 1.0, ()), "activations"),
        (Kernel("triton_red_fused__log_softmax", "", "forward", 1.0, ()), "head and loss"),
        (Kernel("anything", "aten::add", "optimizer", 1.0, ()), "optimizer"),
        (Kernel("triton_poi_fused_add_view_2", "", "forward", 1.0, ()), "other"),
        (Kernel("Memset (Device)", "aten::mm", "forward", 1.0, ()), "other"),
    ],
)
def test_groups(kernel: Kernel, group: str) -> None:
    assert group_of(kernel, tokens=64) == group
    assert group in GROUPS


def test_floors_of_products_are_operations_and_of_others_bytes() -> None:
    kernels = [
        gemm("forward", (64, 32), (32, 48)),
        Kernel("norm_kernel", "", "forward", 2.0, (((1000, 1000), 2),)),
    ]
    rows = {row.group: row for row in group_kernels(kernels, TINY[-1], CEILINGS, step_ms=5.0)}
    assert rows["GEMM, fprop"] == Row(
        "GEMM, fprop", 1.0, 1, 2 * (64 * 32 + 32 * 48 + 64 * 48), 1e3 * 2 * 64 * 32 * 48 / 1e12
    )
    assert rows["norms"] == Row("norms", 2.0, 1, 2_000_000, pytest.approx(2e-3))
    assert rows["gaps"].ms == 2.0
    assert list(rows) == ["GEMM, fprop", "norms", "gaps"]


@pytest.mark.parametrize("bytes_each, rate", [(2, 1e12), (1, 2e12)])
def test_the_floor_of_the_head_follows_its_operands(bytes_each: int, rate: float) -> None:
    shapes = (((32, 64), bytes_each), ((64, 32000), bytes_each))
    product = Kernel("nvjet", "aten::_scaled_mm", "forward", 1.0, shapes)
    row, _ = group_kernels([product], TINY[-1], CEILINGS, step_ms=1.0)
    assert (row.group, row.floor_ms) == (
        "head and loss",
        pytest.approx(1e3 * 3 * 2 * 32 * 64 * 32000 / rate),
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_phases_make_the_step_that_is_timed(optimizer: str) -> None:
    module = torch.nn.Embedding(32000, 8)
    before = module.weight.detach().clone()
    losses = []

    def run(tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        losses.append(torch.nn.functional.cross_entropy(module(tokens).flatten(0, 1), wanted.flatten() % 8))
        return losses[-1]

    for name, phase in phases_of(TINY[-1], module, run, "cpu", optimizer=optimizer):
        phase()
        if name == "backward":
            assert module.weight.grad is not None
    assert module.weight.grad is None
    assert len(losses) == 1 and not torch.equal(module.weight, before)


def test_parts_of_a_model_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, original = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: original(self, backend=graphs, **options)
    )
    monkeypatch.setattr(importlib.import_module("narrowcast_tools.bench.works"), "BLOCKS_AT_ONCE", 1)
    module = build(Work("", "model", (3, 32, 32, 2, 1, 1, 16)), None, "cpu")
    tokens = torch.randint(0, 32000, (2, 1, 16))
    expected = module(*tokens)
    module.compile_parts()
    loss = module(*tokens)
    assert torch.allclose(loss, expected, rtol=1e-2)
    assert graphs.frame_count == 2  # block and loss


GAPS = Row("gaps", 1.0, 0, 0, 0.0)
ACCOUNTS = [
    Account("bf16", 9.0, True, (Row("GEMM, fprop", 8.0, 4, 10**9, 6.0), GAPS)),
    Account(
        "delayed",
        7.0,
        False,
        (Row("GEMM, fprop", 4.0, 4, 10**9, 3.0), Row("casts", 2.0, 2, 10**9, 1.0), GAPS),
    ),
]


def test_what_is_shown_and_written(tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    console.print(account_table(ACCOUNTS[1], "1B"))
    shown = console.export_text()
    assert "1B: delayed, 7.0 ms as the host issues it; capturing failed" in shown
    assert max(map(len, shown.splitlines())) <= 80
    write_account(ACCOUNTS, CEILINGS, tmp_path / "account.csv", {"device": "one GPU"})
    rows = list(csv.DictReader((tmp_path / "account.csv").open()))
    assert [row["group"] for row in rows] == ["GEMM, fprop", "gaps", "GEMM, fprop", "casts", "gaps"]
    casts = rows[3]
    assert (casts["ms"], casts["share_of_floor"], casts["device"]) == ("2.000", "0.500", "one GPU")
    assert casts["copy_per_second"] == "1e+12"
    assert draw_account(ACCOUNTS, "narrowcast bench account: one GPU").startswith(b"\x89PNG")


def test_the_picture_has_a_bar_of_parts_per_contender() -> None:
    """Four bars for each of seven groups had to be added up by the reader."""
    head = Row("head and loss", 0.5, 2, 0, 0.0)
    others = [
        ACCOUNTS[0]._replace(rows=(*ACCOUNTS[0].rows, head)),
        ACCOUNTS[1]._replace(contender="block, head in current", rows=(*ACCOUNTS[1].rows, head)),
    ]
    drawn = account_figure(others, "", wide=True)
    (axes,) = drawn.axes
    assert [name.get_text() for name in axes.get_yticklabels()] == ["bf16", "FP8 128-block"]
    assert [text.get_text() for text in axes.texts[-2:]] == [" 9.0 ms", " 7.0 ms"]
    title = drawn.legends[0].get_title().get_text().replace("\n", " ")
    assert title == "A training step takes 7.0 ms in FP8 128-block, 9.0 ms in bf16"
    keys = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert keys == ["matrix products", "quantizing", "head, loss", "other, GPU idle"]
    assert "The recipes also have a head in FP8 current." in drawn.get_supxlabel().replace("\n", " ")


def test_a_part_is_the_sum_of_what_the_table_shows() -> None:
    """The page's cells added up to another number than the bar had."""
    rows = (Row("other", 3.321, 1, 0, 0.0), Row("gaps", 1.83, 0, 0, 0.0))
    (axes,) = account_figure([Account("bf16", 5.151, True, rows)], "").axes
    assert f"{sum(row.ms for row in rows):.1f}" == "5.2"
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([5.1])
    assert [text.get_text() for text in axes.texts] == ["5", " 5.2 ms"]


def test_small_parts_of_the_picture_have_numbers() -> None:
    """Parts of two to five percent of a bar had none."""
    rows = (Row("GEMM, fprop", 97.6, 1, 0, 0.0), Row("norms", 2.4, 1, 0, 0.0))
    (axes,) = account_figure([Account("bf16", 100.0, True, rows)], "", wide=True).axes
    assert [text.get_text() for text in axes.texts] == ["98", "2", " 100.0 ms"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--device", "cpu"], "times the kernels of a GPU"),
        (["--device", "cpu", "--model", "9b"], "times the kernels of a GPU"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "account", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_no_device_is_advised_that_account_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "account", "--device", "cuda"]) == 2
    assert "no CUDA device; run it on a GPU, or bench tiny here" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_account_of_a_small_step_covers_it() -> None:
    account = take_account(MODELS[0], Contender("bf16", "compiled", None), CEILINGS)
    times = {row.group: row.ms for row in account.rows}
    assert {
        "GEMM, fprop",
        "GEMM, dgrad",
        "GEMM, wgrad",
        "attention",
        "head and loss",
        "optimizer",
    } <= times.keys()
    products = {row.group: row.kernels for row in account.rows if row.group.startswith("GEMM")}
    assert products == {"GEMM, fprop": 48, "GEMM, dgrad": 48, "GEMM, wgrad": 48}  # four a layer
