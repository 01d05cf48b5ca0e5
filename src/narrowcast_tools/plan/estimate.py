"""The model of one training step: what a GPU holds, sends, and does in which time. Formulas: ``docs/scaling.md``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

from ..hardware import ATTENTION, CODED, ELEMENTWISE, GIB, HOST, RECIPES, STOLEN, Gpu, Rates, find_rates
from ..words import any_of
from .models import Model

LOGITS = 2**27  # what a chunk of ``linear_cross_entropy`` holds, and 1024 classes at least


@dataclass(frozen=True)
class Layout:
    """The layout of a step: ``gpus = fsdp x tp x pp x cp``, experts over ``ep`` of the fsdp x cp ranks.

    ``stages`` are the virtual pipeline stages of a rank, ``micro_batch`` the sequences of a microbatch, ``batch`` the
    tokens of a step over all GPUs. ``state`` are the bytes of a weight, its gradient and its optimizer state, as they
    are sharded. ``reduced`` are the bytes of a gradient that FSDP sends: 2 where it is computed in bf16 and summed in
    fp32 on arrival, as :func:`narrowcast.distributed.shard` does; 4 where PyTorch's FSDP2 reduces in fp32.
    ``overlap_experts``: the exchange of experts runs beside computation and sends a token once to a host and to at most
    four of them, as DeepSeek-V3 does. ``saved_fp8``: the recipe has ``saved_activations="fp8"``; the tensors of the
    attention stay in bf16, as `narrowcast train` has them. ``chunked_loss``: the loss is ``linear_cross_entropy``.
    ``step_in_backward``: the optimizer steps a layer's weights as soon as it has their gradients.
    """

    gpus: int
    batch: int
    length: int = 8192
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    stages: int = 1
    micro_batch: int = 1
    recompute: bool = False
    fp8_gather: bool = False
    overlap_experts: bool = False
    saved_fp8: bool = False
    chunked_loss: bool = False
    step_in_backward: bool = False
    state: tuple[float, float, float] = (4.0, 4.0, 8.0)
    reduced: float = 2.0

    @property
    def fsdp(self) -> int:
        """Ranks that share a parameter's shards."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        """Microbatches of a step on one rank."""
        return self.batch // (self.length * self.fsdp * self.micro_batch)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch that one rank of tensor parallelism has."""
        return self.length * self.micro_batch / self.cp

    @property
    def gathered(self) -> float:
        """Bytes of a weight that FSDP gathers: codes, scales of 128 x 128 tiles being next to nothing."""
        return 1.0 if self.fp8_gather else 2.0

    @property
    def sent(self) -> float:
        """Bytes of a gradient that FSDP sends: the state's where microbatches of a pipeline were summed before."""
        return self.state[1] if self.pp > 1 and self.micro_batches > 1 else self.reduced

    def __str__(self) -> str:
        parts = {"FSDP": self.fsdp, "TP": self.tp, "PP": self.pp, "CP": self.cp, "EP": self.ep}
        return " x ".join(f"{n} {v}" for n, v in parts.items() if v > 1 or n in ("FSDP", "TP", "PP"))


@dataclass
class Estimate:
    """A step on one GPU: bytes held, bytes received per step, seconds per step; ``seconds`` are the exposed parts."""

    model: str
    recipe: str
    layout: Layout
    memory: dict[str, float] = field(default_factory=dict)
    wire: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0  # per GPU
    mfu: float = 0.0

    @property
    def total_memory(self) -> float:
        """Bytes held at the peak."""
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        """Return all numbers, with the totals."""
        layout = {**asdict(self.layout), "fsdp": self.layout.fsdp, "micro_batches": self.layout.micro_batches}
        totals = {"memory_total": self.total_memory, "wire_total": sum(self.wire.values()), "step": self.step}
        return {**asdict(self), "layout": layout, **totals}


def check(model: Model, layout: Layout, recipe: str) -> None:
    """Raise ValueError for a layout that does not divide, naming the value and what it must be."""
    for name in ("gpus", "batch", "length", "tp", "pp", "cp", "ep", "stages", "micro_batch"):
        if getattr(layout, name) < 1:
            raise ValueError(f"{name} is {getattr(layout, name)}; it must be at least 1")
    sizes = [n for n in range(1, HOST + 1) if layout.gpus % n == model.heads % n == 0]
    if layout.tp not in sizes:
        raise ValueError(
            f"--tp-size is {layout.tp}; it must divide --gpus {layout.gpus} and the {model.heads} heads; "
            f"use {any_of(sizes)}"
        )
    groups = layout.tp * layout.pp * layout.cp
    if layout.gpus % groups:
        split = {"--tp-size": layout.tp, "--pp-size": layout.pp, "cp": layout.cp}
        product = " x ".join(f"{name} {ranks}" for name, ranks in split.items() if ranks > 1)
        raise ValueError(f"{product} does not divide --gpus {layout.gpus}; use sizes whose product does")
    ranks = layout.fsdp * layout.cp
    fitting = [n for n in range(1, max(model.experts, 1) + 1) if model.experts % n == ranks % n == 0]
    lengths = [n for n in range(1, model.layers + 1) if layout.gpus % (n * layout.tp * layout.cp) == 0]
    rules = (
        (
            layout.pp > model.layers or layout.stages > ceil(model.layers / layout.pp),
            f"--pp-size is {layout.pp} x {layout.stages} stages, for {model.layers} layers; use {any_of(lengths)}",
        ),
        (layout.ep > 1 and not model.experts, f"{model.name} has no experts; leave --ep-size out"),
        (
            model.experts and layout.ep not in fitting,
            f"--ep-size is {layout.ep}; it must divide the {model.experts} experts and the {ranks} ranks of FSDP"
            f"{' x CP' if layout.cp > 1 else ''}; use {any_of(fitting)}",
        ),
        (
            layout.batch % (layout.fsdp * layout.micro_batch * layout.length),
            f"{layout.batch} tokens do not divide into microbatches of {layout.micro_batch} x {layout.length} for "
            f"each of {layout.fsdp} data-parallel ranks; give a multiple of their product",
        ),
        (
            layout.fp8_gather and recipe == "bf16",
            "an FP8 gather needs an FP8 recipe; leave fp8_gather out, or use --recipe current",
        ),
        (
            layout.saved_fp8 and recipe == "bf16",
            "saved activations in FP8 need an FP8 recipe; leave --saved-activations out, or use --recipe current",
        ),
        (
            layout.step_in_backward and (layout.gpus > 1 or layout.micro_batches > 1),
            "steps in the backward are those of one GPU and one microbatch; use --gpus 1 --batch-size 1, or leave "
            "--step-in-backward out",
        ),
    )
    for broken, rule in rules:
        if broken:
            raise ValueError(rule)


def estimate(model: Model, layout: Layout, recipe: str, gpu: Gpu) -> Estimate:
    """Estimate a step.

    Returns:
        memory, bytes received and seconds by part, of one GPU.

    Raises:
        ValueError: a layout that does not divide, or a recipe without rates. Whether it fits is the caller's question.
    """
    rates = find_rates(recipe)
    check(model, layout, recipe)
    result = Estimate(model.name, recipe, layout)
    result.memory = held(model, layout, recipe)
    result.wire, exposed, hidden = _traffic(model, layout, rates, gpu)
    work = _work(model, layout, rates, gpu)
    forward = sum(work.values()) / (4 if layout.recompute else 3)
    late = {name: max(0.0, seconds - window * forward) for name, (seconds, window) in hidden.items()}
    # What is overlapped takes multiprocessors from the GEMMs beside it.
    slowed = STOLEN * sum(seconds - late[name] for name, (seconds, _) in hidden.items())
    busy = {**work, "slowed by overlap": slowed, **{f"exposed: {name}": t for name, t in exposed.items()}}
    for name, seconds in late.items():
        busy[f"exposed: {name}"] = busy.get(f"exposed: {name}", 0.0) + seconds
    bubble = (layout.pp - 1) / (layout.micro_batches * layout.stages) * sum(busy.values())
    shards = _shards(model, layout)
    sweep = shards * (3 * layout.state[0] + layout.state[1] + 2 * layout.state[2]) / gpu.copy
    result.seconds = {**busy, "pipeline bubble": bubble, "optimizer": sweep}
    result.tokens_per_second = layout.micro_batches * layout.tokens / layout.tp / layout.pp / result.step
    result.mfu = result.tokens_per_second * model.flops(layout.length) / gpu.peak
    return result


def _weights(model: Model, layout: Layout) -> tuple[float, float, float]:
    """Return weights of the largest pipeline rank, unsharded by FSDP: layers, experts, embedding and head."""
    layers = ceil(model.layers / layout.pp)
    mixtures = min(model.moe_layers, layers)
    ends = (2 if layout.pp == 1 and not model.tied else 1) * model.dim * model.vocabulary / layout.tp
    return (
        layers * model.layer_weights / layout.tp,
        mixtures * model.expert_weights / (layout.ep * layout.tp),
        ends,
    )


def _shards(model: Model, layout: Layout) -> float:
    """Return weights that one GPU owns."""
    layers, experts, ends = _weights(model, layout)
    ranks = layout.fsdp * layout.cp
    return (layers + ends) / ranks + experts / (ranks // layout.ep)


def held(model: Model, layout: Layout, recipe: str) -> dict[str, float]:
    """Return the bytes that one GPU holds at the peak of a step, by part; which GPU makes no difference.

    Raises:
        ValueError: as :func:`estimate`.
    """
    rates = find_rates(recipe)
    check(model, layout, recipe)
    layers, experts, ends = _weights(model, layout)
    count = ceil(model.layers / layout.pp)
    shards = _shards(model, layout)
    gathered = layout.gathered
    memory = {f"{name} shards": shards * size for name, size in zip(("parameter", "gradient"), layout.state)}
    memory["optimizer state"] = shards * layout.state[2]
    if layout.step_in_backward:  # the head's, while all activations are there
        memory["gradient shards"] = ends / 2 * layout.state[1]
    # Without a pipeline two layers are gathered at a time and one has gradients; with one, all stay for the whole step,
    # and their gradients, in the state's precision, until they are scattered. One rank gathers nothing.
    whole = layers + experts + ends
    one = (layers + experts) / count * (layout.fsdp * layout.cp > 1)
    memory["gathered parameters"] = 2 * one * gathered if layout.pp == 1 else whole * gathered
    full = one * 2.0 if layout.pp == 1 else whole * layout.state[1] - memory["gradient shards"]
    memory["full gradients"] = max(0.0, full)
    if layout.fp8_gather and layout.pp == 1:  # the backward gathers the forward's codes once more
        ranks = layout.fsdp * layout.cp
        memory["codes of shards"] = (layers / ranks + experts / (ranks // layout.ep)) * gathered * (ranks > 1)
    rows = layout.tokens / layout.tp
    saved = _saved(model, rates, layout.saved_fp8)
    in_flight = min(layout.micro_batches, layout.pp) + (layout.pp - 1) / layout.stages * (layout.stages > 1)
    in_flight = min(in_flight, layout.micro_batches)
    kept = 2.0 * model.dim if layout.recompute else saved
    memory["activations"] = rows * (kept * count * in_flight + (saved if layout.recompute else 0.0))
    working = rows * 2 * (2 * model.dim + 2 * model.active_hidden)
    logits = rows * model.vocabulary * 6.0
    if layout.chunked_loss:  # one chunk in bf16, and the gradient of the head's input in fp32
        logits = min(logits, 2.0 * max(LOGITS, 1024 * rows) + 4.0 * rows * model.dim)
    memory["logits, or a layer's gradients"] = max(logits, working)
    if layout.micro_batches == 1 and not layout.step_in_backward:  # gradients come as activations go
        memory["not at the same time"] = -min(
            memory["gradient shards"] + memory["full gradients"], memory["activations"]
        )
    return memory


def _saved(model: Model, rates: Rates, in_codes: bool) -> float:
    """Return bytes that one layer keeps of one token for its backward; linear layers keep their input in the codes."""
    d, f, k = model.dim, model.active_hidden, model.kv_heads * model.head_dim
    h, q = model.heads * model.head_dim, model.heads * model.key_dim
    copies = model.active_experts + model.shared_experts if model.experts else 1
    # Queries, keys, values and output; inputs of both norms, gate and up; inputs of the projections and of the
    # feed-forward layer's two.
    own = 2.0 * (q + 2 * k + h) + (CODED if in_codes else 2.0) * (2 * d + 2 * f)
    linear = d + d * copies + f
    return own + linear * rates.code + (0.0 if rates.code == 2 else h * rates.code)


def _work(model: Model, layout: Layout, rates: Rates, gpu: Gpu) -> dict[str, float]:
    """Return seconds of computation in a step of one GPU, with the layers of the largest stage."""
    rows = layout.tokens * layout.micro_batches / layout.tp
    passes = (4 if layout.recompute else 3) / 3
    layers = rows * ceil(model.layers / layout.pp)
    forward = 2 * model.active_layer_weights
    gemm = forward * (1 / rates.fprop * (2 if layout.recompute else 1) + 1 / rates.dgrad + 1 / rates.wgrad)
    head = 6 * model.dim * model.vocabulary / layout.pp / RECIPES["bf16"].fprop
    moved = ELEMENTWISE * gpu.copy
    d, f, h = model.dim, model.active_hidden, model.heads * model.head_dim
    k, copies = model.kv_heads * model.head_dim, model.active_experts
    # Norms and residuals, SwiGLU, rotary embeddings; permuting the copies for the experts, and back.
    elements = 20 * d + 9 * f + 4 * (h + k) + 10 * d * copies
    grads = h + 2 * k + 2 * d + 2 * f + d * copies
    quantized = (2 * d + h + f + d * copies + grads) * rates.quantize * rows
    # FSDP's copies: out of gathered bf16 twice, while codes arrive where they are read; into what is reduced in fp32,
    # while bf16 gradients are only read on arrival. Weights are quantized in both directions.
    weights, experts, _ = _weights(model, layout)
    rounds = layout.micro_batches if layout.pp == 1 else 1
    of_gradients = 2 if layout.sent == 2 else 6
    copied = (weights + experts) * rounds * ((0 if layout.fp8_gather else 8) + of_gradients)
    casts = (weights + experts) * layout.micro_batches * rates.quantize * (0.5 if layout.fp8_gather else 1.5)
    return {
        "GEMMs": layers * gemm + rows * head,
        "attention": layers * 3 * model.attention_flops(layout.length) * passes / ATTENTION,
        "quantizing": (quantized * ceil(model.layers / layout.pp) * passes + casts) / moved,
        "norms, activations, copies": (
            layers * 2 * elements * passes
            + rows * model.vocabulary * 12 / layout.pp
            + copied * (layout.fsdp > 1)
        )
        / moved,
    }


def _traffic(
    model: Model, layout: Layout, rates: Rates, gpu: Gpu
) -> tuple[dict[str, float], dict[str, float], dict[str, tuple[float, float]]]:
    """Return bytes received per step; seconds that nothing hides; seconds to hide, and in how many forwards' time."""
    rows = layout.tokens * layout.micro_batches
    layers, experts, ends = _weights(model, layout)
    count = ceil(model.layers / layout.pp)
    wire: dict[str, float] = {}
    exposed: dict[str, float] = {}
    hidden: dict[str, tuple[float, float]] = {}

    ranks, expert_ranks = layout.fsdp * layout.cp, layout.fsdp * layout.cp // layout.ep
    rounds = layout.micro_batches if layout.pp == 1 else 1
    gathers = rounds * (2 if layout.pp == 1 else 1)
    dense, mixed, rest = layers * _others(ranks), experts * _others(expert_ranks), ends * _others(ranks)
    wire["FSDP all-gather"] = gathers * ((dense + mixed) * layout.gathered + rest * 2)
    wire["FSDP reduce-scatter"] = rounds * (dense + mixed + rest) * layout.sent
    # Ranks that hold the same experts lie further apart, so fewer of a host's cards serve each of their rings.
    each, reduced = gathers * layout.gathered, rounds * layout.sent
    seconds = (dense * (each + reduced) + rest * (gathers * 2 + reduced)) / _ring(ranks, layout.tp, gpu)
    seconds += mixed * (each + reduced) / _ring(expert_ranks, layout.tp * layout.ep, gpu)
    # The first gather and the last reduction have nothing beside them; the rest has a forward, or a backward.
    first = seconds / (gathers + 2 * rounds) / count if seconds else 0.0
    exposed["FSDP"] = 3 * first / max(rounds, 1) * (layout.pp == 1)
    hidden["FSDP"] = (seconds - exposed["FSDP"], 3.0 if layout.pp == 1 else 1.0)

    if layout.tp > 1:
        piece = rows * model.dim * _others(layout.tp) * count
        forwards = 2 if layout.recompute else 1
        # Gathered: the inputs of two pairs of layers, their gradients, and the inputs again for wgrad.
        # Reduced: as many, in bf16. A recomputed forward does both once more.
        wire["TP/SP collectives"] = piece * ((2 * forwards + 4) * rates.code + (2 * forwards + 2) * 2)
        exposed["TP/SP"] = wire["TP/SP collectives"] / gpu.link
    if layout.cp > 1:
        whole = (
            layout.length * layout.micro_batch * layout.micro_batches * 2 * model.kv_heads * model.head_dim
        )
        wire["CP keys and values"] = count * whole / layout.tp * _others(layout.cp) * 2 * 3
        exposed["CP"] = wire["CP keys and values"] / min(gpu.link, gpu.network * max(1, HOST // layout.tp))
    if layout.ep > 1:
        routed = rows * count * model.moe_layers / model.layers
        wire["expert all-to-all"], seconds = _experts(model, layout, rates, gpu, routed)
        if layout.overlap_experts:
            hidden["experts"] = (seconds, 3.0)
        else:
            exposed["experts"] = seconds
    if layout.pp > 1:
        wire["pipeline sends"] = rows * model.dim / layout.tp * 2 * 2 * layout.stages
        hidden["pipeline"] = (wire["pipeline sends"] / gpu.network, 3.0)
    return wire, exposed, hidden


def _experts(model: Model, layout: Layout, rates: Rates, gpu: Gpu, rows: float) -> tuple[float, float]:
    """Return bytes and seconds of the all-to-all of experts: codes to them, bf16 back, both ways in bf16 in the
    backward.
    """
    hosts = max(1, layout.ep * layout.tp // HOST)
    near = _others(min(layout.ep, HOST // layout.tp)) / hosts
    far = 1 - 1 / hosts
    copies = float(model.active_experts)
    recomputed = rates.code + 2 if layout.recompute else 0.0
    size = model.dim / layout.tp * (rates.code + 6 + recomputed) * rows
    over_hosts = (min(copies, 4.0, hosts) if layout.overlap_experts else copies) * far * size
    inside = copies * ((1 - 1 / HOST) if layout.overlap_experts and hosts > 1 else near) * size
    both = over_hosts / gpu.network, inside / gpu.link
    return over_hosts + inside, max(both) if layout.overlap_experts else sum(both)


def _others(ranks: int) -> float:
    """Return the share of a gathered tensor that comes from other ranks."""
    return (ranks - 1) / ranks


def _ring(ranks: int, inner: int, gpu: Gpu) -> float:
    """Return bytes per second of a ring whose ranks lie ``inner`` GPUs apart: a host's ring has a card for each rank in
    it.
    """
    if ranks * inner <= HOST:
        return gpu.link
    return min(gpu.link, gpu.network * max(1, HOST // inner))


def gib(size: float) -> str:
    """Return bytes as GiB, or as MiB if they are few."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{1024 * size / GIB:,.1f} MiB"
