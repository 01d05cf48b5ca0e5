"""Every kernel compiles for GPUs that are not here, and fits them: one launch of each, in turn; all on request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from . import record_launches
from .conftest import HAS_TRITON
from .cross_compile import LAUNCHES, RECORDED, SHARED_MEMORY, Compiled, hash_of, recorded, variants

if HAS_TRITON:
    import triton

SCRIPT = Path(__file__).with_name("cross_compile.py")
ROOT = SCRIPT.parents[2]

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


def _compile(*arguments: str, timeout: int = 900) -> str:
    """In a process of its own, for the interpreter leaves its marks on Triton's functions."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_launch_of_every_kernel_compiles() -> None:
    """On one of the GPUs each, in turn."""
    kernels = json.loads(LAUNCHES.read_text())
    assert len(kernels) >= 45
    assert f"{len(kernels)} compiled, 0 faults" in _compile("--most", "1", "--each-on-one")


SAMPLE = ("delayed.", "dequantize.", "mx.")


def test_the_code_is_as_recorded() -> None:
    """Of a few kernels, for Hopper and Blackwell: a change that claims to alter no bit and no speed alters no code."""
    of_triton, _ = recorded()
    if of_triton != triton.__version__:
        pytest.skip(f"ptx.csv is of Triton {of_triton}")
    count = len(RECORDED) * sum(kernel.startswith(SAMPLE) for kernel in json.loads(LAUNCHES.read_text()))
    found = _compile("--most", "1", "--gpus", *map(str, RECORDED), "--kernels", *SAMPLE)
    assert f"{count} compiled, 0 faults, {count} with the code of ptx.csv" in found


def test_every_kernel_has_recorded_code() -> None:
    """Of launches that tests make; after a change of either, run ``cross_compile.py --gpus 90 100 --record``."""
    _, hashes = recorded()
    launches = {(variant.kernel, variant.key) for variant in variants()}
    assert not hashes.keys() - launches
    assert {kernel for kernel, _ in hashes} == {kernel for kernel, _ in launches}
    assert all(set(of_gpu) == set(RECORDED) for of_gpu in hashes.values())


def test_a_run_of_some_tests_records_their_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "launches.json"
    shutil.copy(LAUNCHES, file)
    monkeypatch.setattr(record_launches, "PATH", file)
    monkeypatch.setattr(record_launches, "_seen", {})
    record_launches.pytest_unconfigure()
    assert file.read_text() == LAUNCHES.read_text()
    name = "cross_entropy._cross_entropy_gradient_kernel"
    monkeypatch.setattr(record_launches, "_seen", {name: {json.dumps([8, {}, ["*fp32:16"], [2048]])}})
    record_launches.pytest_unconfigure()
    kept, found = json.loads(LAUNCHES.read_text()), json.loads(file.read_text())
    assert found == {**kept, name: [[8, {}, ["*fp32:16"], [2048]]]}


def test_comments_and_places_in_the_source_are_no_code() -> None:
    code = ".visible .entry k(\n)\n{\n\tret;\n}\n"
    told = (
        "//\n.version 9.4\n.visible .entry k(  // -- Begin\n)\n{\n$L__func_begin0:\n\t.loc\t1 17 0  // a.py:17:0\n"
        '$L__tmp0:\n\tret;\n}\n\t.file\t1 "/a.py"\n\t.section\t.debug_info\n\t{\n.b8 1\n\t}\n'
    )
    assert hash_of(told) == hash_of(code) != hash_of(code.replace("ret", "exit"))


def test_no_kernel_takes_maxima_that_keep_nan() -> None:
    """triton-lang/triton#11111: beside them, ptxas 12.9 garbles FP8 codes that go through shared memory by bytes.

    Triton 3.8 takes that ptxas for Hopper, and 3.8 and 3.9 for sm_89. ``codecs.at_most`` keeps NaN in another way.
    """
    sources = list((ROOT / "src/narrowcast/kernels").glob("*.py"))
    assert len(sources) > 20
    assert not [path.name for path in sources if "PropagateNan" in path.read_text()]


@pytest.mark.requested
def test_every_launch_compiles_for_every_gpu() -> None:
    _compile(timeout=7200)


@pytest.mark.parametrize("gpu", SHARED_MEMORY)
def test_what_does_not_fit_is_a_fault(gpu: int) -> None:
    fits = Compiled(warps=8, shared=SHARED_MEMORY[gpu], registers=255, spilled=0, bytes_at_risk=False)
    assert not fits.fault(gpu)
    for name, value, reason in (
        ("shared", SHARED_MEMORY[gpu] + 1, "shared memory"),
        ("warps", 16, "registers 255 x 512"),
        ("bytes_at_risk", True, "triton#11111"),
    ):
        assert reason in Compiled(**(vars(fits) | {name: value})).fault(gpu)


def test_little_shared_memory_has_fewer_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four do not fit GPUs of compute capability 8.9 and 12, which failed with out of resources."""
    from narrowcast.kernels import grouped_gemm

    device = torch.device("cuda", 0)
    for gpu, shared in SHARED_MEMORY.items():
        found = types.SimpleNamespace(shared_memory_per_block_optin=shared, multi_processor_count=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        assert grouped_gemm.limits.__wrapped__(device) == (1, gpu in (90, 100))
    assert grouped_gemm.limits(torch.device("cpu"))[1]
    for name in ("_rows", "_contraction"):
        few, many = getattr(grouped_gemm, f"{name}_in_little"), getattr(grouped_gemm, name)
        assert few.kernel is many.kernel and (few.options["num_stages"], many.options["num_stages"]) == (2, 4)
