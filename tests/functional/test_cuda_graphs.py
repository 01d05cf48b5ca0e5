"""On a GPU no operator waits for the device, all can be captured, and quantizing allocates little but its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from quantizers.catalog import E4M3, VARIANTS
from reference.checks import assert_bitwise
from torch import Tensor

import narrowcast as nc
from narrowcast import functional
from narrowcast.quantizers import DelayedFloat8Quantizer

SHAPE = (256, 384)  # whole blocks of every format
OUT_FEATURES = 128
SCRATCH_BYTES = 2**20
NATIVE = ("current", "current e5m2", "block", "block 1d", "identity", "delayed")
# what the weight and the gradient take where a product of two alike is not native
PARTNERS = {
    "current e5m2": "current",
    "delayed": "current",
    "block": "block 1d",
    "block fp32 scales": "block 1d",
}
WRITES = [*VARIANTS, "delayed"]

Step = Callable[[], list[Tensor]]


class Work:
    """A quantizer with the tensors that a step of it reads and writes; the same on every device."""

    def __init__(self, name: str, device: str, shape: tuple[int, int] = SHAPE) -> None:
        self.delayed = name == "delayed"
        self.quantizer: nc.Quantizer = DelayedFloat8Quantizer(E4M3, 1) if self.delayed else VARIANTS[name]
        self.x = torch.empty(shape, device=device, dtype=torch.bfloat16)
        self.seed = torch.zeros(1, device=device, dtype=torch.int64)
        self.scale = torch.full((3,), 4.0, device=device)
        self.amax = torch.zeros(3, device=device)
        self.main_grad = torch.zeros(OUT_FEATURES, shape[1], device=device)
        partner = VARIANTS[PARTNERS.get(name, name)].replace(internal=True)
        self.weight, self.grad = (
            partner.quantize(torch.randn(rows, columns, device=device, dtype=torch.bfloat16))
            for rows, columns in ((OUT_FEATURES, shape[1]), (shape[0], OUT_FEATURES))
        )
        self.refill(0)

    def refill(self, seed: int) -> None:
        """New input values and a new seed, in place."""
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=generator) * (seed + 1))
        self.seed.fill_(seed)

    def buffers(self) -> list[Tensor]:
        """Quantize in both directions."""
        if self.delayed:
            return functional.quantize(self.x, self.quantizer, None, self.scale, self.amax)
        stochastic = self.quantizer._is_stochastic()
        return functional.quantize(self.x, self.quantizer, self.seed if stochastic else None)

    def quantize(self) -> list[Tensor]:
        """What quantizing returns, and the state it wrote."""
        return [*self.buffers(), self.amax] if self.delayed else self.buffers()

    def dequantize(self) -> list[Tensor]:
        storage = self._storage(self.buffers())
        return [
            functional.dequantize(operand, self.quantizer, columnwise, torch.bfloat16, list(self.x.shape))
            for columnwise, operand in (
                (False, storage.rowwise_operand()),
                (True, storage.columnwise_operand()),
            )
        ]

    def multiply(self, emulate: bool) -> list[Tensor]:
        """fprop and an accumulating wgrad with the freshly quantized input."""
        storage = self._storage(self.buffers())
        weight, grad = self.weight, self.grad
        out = functional.gemm(
            "fprop",
            storage.rowwise_operand(),
            self.quantizer,
            weight.rowwise_operand(),
            weight._quantizer,
            None,
            torch.bfloat16,
            self.x.shape[0],
            OUT_FEATURES,
            False,
            emulate,
        )
        self.main_grad.zero_()
        functional.gemm_accumulate_(
            "wgrad",
            self.main_grad,
            grad.columnwise_operand(),
            grad._quantizer,
            storage.columnwise_operand(),
            self.quantizer,
            False,
            emulate,
        )
        return [out, self.main_grad]

    def _storage(self, buffers: list[Tensor]) -> nc.QuantizedTensorStorage:
        return self.quantizer.replace(internal=True)._assemble(buffers, tuple(self.x.shape), torch.bfloat16)


@contextmanager
def synchronizing_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step: Step) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The step as a graph, warmed up on a side stream, and the tensors that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def check_replays(work: Work, step: Step) -> None:
    """Replays on new data equal eager, bit for bit."""
    graph, outputs = capture(step)
    for seed in (1, 2):
        work.refill(seed)
        work.amax.zero_()
        expected = [t.clone() for t in step()]
        for output in outputs:
            output.view(torch.uint8).fill_(0xAA)  # so that a replay that writes nothing shows
        work.amax.zero_()
        graph.replay()
        for index, (actual, eager) in enumerate(zip(outputs, expected, strict=True)):
            assert_bitwise(actual, eager, f"output {index} after {seed} replays")


def steps(work: Work, name: str) -> dict[str, Step]:
    """What must neither wait nor fail to be captured."""
    table: dict[str, Step] = {"quantize": work.quantize, "dequantize": work.dequantize}
    table["emulated gemm"] = lambda: work.multiply(True)
    if name in NATIVE and work.x.is_cuda:
        table["gemm"] = lambda: work.multiply(False)
    return table


@pytest.mark.parametrize("name", WRITES)
def test_steps_are_functions_of_their_data(name: str, device: torch.device) -> None:
    work = Work(name, device.type)
    for what, step in steps(work, name).items():
        results = []
        for seed in (1, 2, 1):
            work.refill(seed)
            work.amax.zero_()
            results.append([t.clone() for t in step()])
        first, other, again = results
        for a, b in zip(first, again, strict=True):
            assert_bitwise(a, b, what)
        assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), what


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITES)
def test_nothing_waits_for_the_device(name: str) -> None:
    work = Work(name, "cuda")
    for step in steps(work, name).values():
        step()  # compiles kernels and fills caches, which may wait
        with synchronizing_is_an_error():
            step()


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITES)
def test_replayed_graphs_equal_eager(name: str) -> None:
    work = Work(name, "cuda")
    for step in steps(work, name).values():
        check_replays(work, step)


@pytest.mark.gpu
def test_a_replay_rounds_with_the_seed_it_finds() -> None:
    work = Work("nvfp4 stochastic", "cuda")
    graph, outputs = capture(work.quantize)
    rounded = []
    for seed in (1, 2, 1):
        work.seed.fill_(seed)
        graph.replay()
        rounded.append([t.clone() for t in outputs])
    first, other, again = rounded
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0]), "another seed must round otherwise"


@pytest.mark.gpu
def test_seeds_drawn_in_a_graph_differ_from_replay_to_replay() -> None:
    x = torch.empty(1, device="cuda")
    graph, (seed,) = capture(lambda: [functional.draw_seed(x)])
    drawn = set()
    for _ in range(3):
        graph.replay()
        drawn.add(seed.item())
    assert len(drawn) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITES)
def test_quantizing_allocates_its_outputs_and_little_else(name: str) -> None:
    work = Work(name, "cuda", (4096, 4096))
    outputs = work.buffers()  # also compiles
    output_bytes = sum(t.untyped_storage().nbytes() for t in outputs)
    del outputs
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work.buffers()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= output_bytes + SCRATCH_BYTES, f"{used - output_bytes} bytes beside the outputs"
