"""Observers anywhere in a history change no bit of it; sizes coincide on purpose.

A model runs a history twice, with observers and without. Everything that a later step could read is compared to the
bit: outputs, gradients, ``main_grad``, parameters, buffers, the optimizer's moments, random numbers. A third run has
none of the options that move no more than roundings: weight gradients that go elsewhere, codes of activations, steps in
the backward, kept weights, compiled blocks, weights whose codes an optimizer writes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import narrowcast as nc

from .models import DTYPES, draw_recipe, recipe_of
from .programs import Difference, Invalid, Program, attempt, compare, normal, refusal, said

KINDS = (
    "linear",
    "norm linear",
    "mlp",
    "attention",
    "attention",
    "transformer",
    "experts",
    "converted",
    "ops",
    "again",
)
OBSERVERS = (
    "watch", "bisect", "receipt", "explain", "state_dict", "deepcopy", "pickle", "repr", "evaluate", "recipes",
    "optimizer", "flops", "hook",
)  # fmt: skip
PLACES = ("before", "after forward", "after backward", "after step")
OPTIMIZERS = (
    "SGD", "AdamW", "FusedAdam", "FusedAdam codes", "FusedAdam masters", "FusedAdam codes masters", "AdamW in backward",
)  # fmt: skip
ROUGH = 0.35
"""How far options may move a gradient: codes of activations and recomputed sums, through a few layers of 4 bits."""


def draw(rng: random.Random) -> Program:
    heads = rng.choice((1, 2, 3, 4))
    # the same number for channels of a head, tokens, sequences and experts, as often as not
    common = rng.choice((4, 8, 8, 16, 32))

    def same(others: tuple[int, ...]) -> int:
        return common if rng.random() < 0.6 else rng.choice(others)

    program: Program = {
        "seed": rng.randrange(10**6),
        "dtype": rng.choice(("float32", "bfloat16")),
        "heads": heads,
        "head": same((8, 16, 24)),
        "tokens": same((1, 3, 8, 17)),
        "sequences": same((1, 2, 3)) % 9 or 2,
        "wide": rng.choice((None, None, 24, 64)),
        "layers": [_draw_layer(rng) for _ in range(rng.choice((1, 2, 2, 3)))],
        "recipe": draw_recipe(rng),
        "how": rng.choice(("set_recipe", "own", "autocast")),
        "saved": rng.random() < 0.4,
        "fuse": rng.random() < 0.3,
        "delay": rng.random() < 0.25,
        "flags": rng.random() < 0.4,
        "invariant": rng.random() < 0.15,
        "compiled": rng.random() < 0.06,
        "optimizer": (optimizer := rng.choice(OPTIMIZERS)),
        "history": [],
    }
    for _ in range(rng.choice((1, 2, 3, 4))):
        item: Program = {
            "do": rng.choice(("step",) * 5 + ("evaluate", "edit", "decode")),
            "batches": [
                rng.randrange(10**6)
                for _ in range(1 if "in backward" in optimizer else rng.choice((1, 1, 2, 3)))
            ],
            "observers": [],
        }
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            item["observers"].append({"name": rng.choice(OBSERVERS), "place": rng.choice(PLACES)})
        program["history"].append(item)
    return program


def _draw_layer(rng: random.Random) -> Program:
    kind = rng.choice(KINDS)
    layer: Program = {"kind": kind, "bias": rng.random() < 0.5}
    if kind in ("attention", "transformer"):
        layer |= {
            "mask": rng.choice(("no_mask", "causal", "causal", "arbitrary", "arbitrary", "padding")),
            "groups": rng.random() < 0.3,
            "rope": rng.random() < 0.3,
        }
    if kind == "experts":
        layer |= {"experts": rng.choice((None, 2, 5)), "score": rng.choice(("softmax", "sigmoid"))}
    return layer


class Experts(nn.Module):
    """A router, and a grouped layer of the experts."""

    def __init__(
        self, width: int, experts: int, score: str, options: dict[str, Any], wgrad: dict[str, Any]
    ) -> None:
        super().__init__()
        rate = 0.01 if score == "sigmoid" else None
        topk = min(2, experts)
        self.router = nc.MoERouter(
            width, experts, topk, score_function=score, bias_update_rate=rate, **options
        )
        self.experts = nc.GroupedLinear(experts, width, width, bias=False, **wgrad, **options)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probs, routing_map, _ = self.router(flat)
        rows, where = nc.moe_permute(flat, routing_map, flat.shape[0] * self.router.topk, map_type="mask")
        splits = routing_map.sum(0).tolist()
        out = self.experts(rows, splits, is_first_microbatch=is_first_microbatch)
        back = nc.moe_unpermute(out, where, probs, restore_shape=flat.shape, map_type="mask")
        return back.view(x.shape)


class Model(nn.Module):
    """Layers of one width, (tokens, sequences, width) each."""

    def __init__(self, program: Program, options: bool) -> None:
        super().__init__()
        self.described, self.layers = program["layers"], nn.ModuleList()
        self.width = (program["heads"] or 1) * (program["head"] or 8)
        dtype = DTYPES[program["dtype"] or "float32"]
        place: dict[str, Any] = {"device": "cpu", "params_dtype": dtype}
        fuse, delay = bool(program["fuse"]) and options, bool(program["delay"]) and options
        wgrad = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
        for described in self.described:
            self.layers.append(self._layer(program, described, place, dtype, wgrad))
        self.head = nn.Linear(self.width, 3).to(dtype)
        for parameter in self.parameters() if fuse else ():
            parameter.main_grad = torch.full(parameter.shape, 0.0)  # type: ignore[attr-defined]

    def _layer(
        self,
        program: Program,
        described: Program,
        place: dict[str, Any],
        dtype: torch.dtype,
        wgrad: dict[str, Any],
    ) -> nn.Module:
        kind, width, bias = described["kind"], self.width, bool(described["bias"])
        if kind == "again":
            return nn.Identity()
        if kind == "linear":
            return nc.Linear(width, width, bias=bias, **wgrad, **place)
        if kind == "norm linear":
            return nc.LayerNormLinear(width, width, bias=bias, **wgrad, **place)
        if kind == "mlp":
            return nc.LayerNormMLP(
                width, program["wide"] or width, bias=bias, activation="swiglu", **wgrad, **place
            )
        if kind == "experts":
            place = {"device": "cpu", "dtype": dtype}
            return Experts(width, described["experts"] or 8, described["score"] or "softmax", place, wgrad)
        if kind == "converted":
            made = nn.Sequential(nn.Linear(width, width, bias=bias), nn.GELU(), nn.Linear(width, width)).to(
                dtype
            )
            return nc.convert(made, recipe_of(program["recipe"]) or "current", small=True)
        if kind == "ops":
            own = {"device": "cpu", "dtype": dtype}
            return nc.ops.Sequential(
                nc.ops.RMSNorm(width, **own), nc.ops.Linear(width, width, bias=bias, **own), nc.ops.GELU()
            )
        heads = program["heads"] or 1
        groups = 1 if described.get("groups") else heads
        options: dict[str, Any] = {"attention_dropout": 0.0, "bias": bias, **place}
        if kind == "attention":
            return nc.MultiheadAttention(
                width, heads, kv_channels=width // heads, num_gqa_groups=groups, input_layernorm=True,
                attn_mask_type=described["mask"] or "no_mask", fuse_qkv_params=True, **wgrad_of(wgrad), **options,
            )  # fmt: skip
        return nc.TransformerLayer(
            width, program["wide"] or width, heads, num_gqa_groups=groups, hidden_dropout=0.0, layer_number=1,
            self_attn_mask_type=described["mask"] or "no_mask", fuse_qkv_params=True, **wgrad_of(wgrad), **options,
        )  # fmt: skip

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        before: list[Any] = []
        for described, layer in zip(self.described, self.layers):
            kind, given = described["kind"], {}
            if kind == "again":
                described, layer = before[0] if before else (described, layer)
                kind = described["kind"]
            else:
                before.append((described, layer))
            if kind not in ("ops", "converted", "again"):
                given["is_first_microbatch"] = first
            if kind in ("attention", "transformer"):
                given |= _mask_of(described, x)
            x = layer(x, **given)
        return self.head(x)


def _looks_on(module: nn.Module, args: Any, out: Any) -> None:
    """Change nothing."""


def wgrad_of(wgrad: dict[str, Any]) -> dict[str, Any]:
    """Options of a transformer layer, which delays no weight gradients."""
    return {"fuse_wgrad_accumulation": wgrad["fuse_wgrad_accumulation"]}


def _mask_of(described: Program, x: Tensor) -> dict[str, Any]:
    tokens, sequences = x.shape[:2]
    mask = described["mask"] or "no_mask"
    made: dict[str, Any] = {}
    if mask == "arbitrary":
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        made["attention_mask"] = hidden[None, None]
    elif mask == "padding":
        lengths = torch.arange(sequences) % tokens + 1
        made["attention_mask"] = torch.arange(tokens)[None, None, None] >= lengths[:, None, None, None]
    if described.get("rope"):
        size = described["head"] if described.get("head") else None
        if size:
            made["rotary_pos_emb"] = nc.RotaryPositionEmbedding(size)(tokens)
    return made


class World:
    """One run of a program: observed or not, with its options or without."""

    def __init__(self, program: Program, observed: bool, options: bool) -> None:
        self.program, self.observed, self.options = program, observed, options
        self.trace: list[tuple[str, Tensor]] = []
        torch.manual_seed(program["seed"] or 0)
        self.model = Model(program, options)
        self.recipe = recipe_of(program["recipe"])
        if self.recipe is not None and program["saved"] and options:
            self.recipe.saved_activations = "fp8"
        if self.recipe is not None and program["how"] == "set_recipe":
            nc.set_recipe(self.model, self.recipe)
        elif self.recipe is not None and program["how"] == "own":
            for module in self.model.modules():
                if isinstance(getattr(type(module), "recipe", None), property):
                    module.recipe = self.recipe  # type: ignore[assignment]
        self.run: Any = self.model
        if program["compiled"] and options:
            self.run = torch.compile(self.model, backend="aot_eager")
        self.optimizer = self._optimizer()
        self.watches: contextlib.ExitStack = contextlib.ExitStack()

    def _optimizer(self) -> Any:
        name, parameters = self.program["optimizer"] or "SGD", list(self.model.parameters())
        self.in_backward = name.endswith("in backward") and self.options and not self.model_fuses()
        if name == "SGD":
            return torch.optim.SGD(parameters, lr=1e-2)
        if name.startswith("AdamW"):
            made = torch.optim.AdamW(parameters, lr=1e-3)
            if self.in_backward:
                nc.optimizers.step_in_backward(made, self.model.layers)
            return made
        codes = self.model if "codes" in name and self.options else None
        masters = "masters" in name and self.program["dtype"] == "bfloat16"
        return nc.optimizers.FusedAdam(parameters, lr=1e-3, weight_codes=codes, master_weights=masters)

    def model_fuses(self) -> bool:
        return bool(self.program["fuse"] or self.program["delay"]) and self.options

    def context(self) -> Any:
        if self.program["how"] == "autocast" and self.recipe is not None:
            return nc.autocast(recipe=self.recipe)
        return contextlib.nullcontext()

    def batch(self, seed: int) -> Tensor:
        shape = self.program["tokens"] or 1, self.program["sequences"] or 1, self.model.width
        return normal(seed, *shape, dtype=DTYPES[self.program["dtype"] or "float32"])

    def record(self, label: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.trace.append((label, value.detach().clone()))

    # -- what happens ------------------------------------------------------------------------------------------------

    def perform(self) -> None:
        for item in self.program["history"]:
            torch.manual_seed((self.program["seed"] or 0) + len(self.trace))
            self.observe(item, "before")
            getattr(self, f"_{item['do']}")(item)
            self.record("random numbers", torch.get_rng_state())
        for name, tensor in self.model.state_dict().items():
            if name.endswith(("scale", "amax", "amax_history")) and not tensor.any():
                continue  # made by the first forward under an autocast, also one that only looks on
            self.record(f"state {name.rpartition('.')[2]}", tensor)
        for parameter in self.model.parameters():  # not in the order of their first gradients
            for name, value in self.optimizer.state.get(parameter, {}).items():
                self.record(f"optimizer {name}", value)
        self.watches.close()

    def _step(self, item: Program) -> None:
        for number, seed in enumerate(item["batches"] or [0]):
            x = self.batch(seed).requires_grad_()
            first = number == 0 if self.program["flags"] and self.options else None
            with self.context():
                out = self.run(x, first)
            self.observe(item, "after forward", x)
            self.record("output", out)
            out.float().square().mean().backward()
            self.record("input gradient", x.grad)
            self._finish_wgrads()
        self.observe(item, "after backward", self.batch((item["batches"] or [0])[0]))
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            main = getattr(parameter, "main_grad", None)
            if self._fused(name):
                grad = main
            if not self.in_backward:
                self.record(f"gradient {name.rpartition('.')[2]}", grad)
            if self._fused(name) and main is not None:
                parameter.grad = main.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            # a step with flags finds the last step's gradient, which its first microbatch overwrites
            if getattr(parameter, "main_grad", None) is not None and not self.program["flags"]:
                parameter.main_grad.zero_()  # type: ignore[attr-defined]
        self.observe(item, "after step", self.batch((item["batches"] or [0])[0]))

    def _finish_wgrads(self) -> None:
        for module in self.model.modules():
            stores = getattr(module, "wgrad_stores", None)
            while stores and len(next(iter(reversed(stores.values())))):
                module.backward_dw()  # type: ignore[operator]

    def _fused(self, name: str) -> bool:
        owner, _, last = name.rpartition(".")
        module = self.model.get_submodule(owner)
        return (
            bool(getattr(module, "fuse_wgrad_accumulation", False))
            and "weight" in last
            and "norm" not in last
        )

    def _evaluate(self, item: Program) -> None:
        self.model.eval()
        with torch.no_grad(), self.context():
            for seed in item["batches"] or [0]:
                self.record("evaluation", self.run(self.batch(seed)))
        self.model.train()

    def _edit(self, item: Program) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.model.parameters()):
                if index % 3 == ((item["batches"] or [0])[0]) % 3:
                    parameter.mul_(1.5)

    def _decode(self, item: Program) -> None:
        """Token by token with a cache, by a layer that has one."""
        for described, layer in zip(self.model.described, self.model.layers):
            if (
                described["kind"] != "transformer"
                or described.get("groups")
                or (self.program["tokens"] or 1) > 8
            ):
                continue
            x = self.batch((item["batches"] or [0])[0])
            tokens, sequences = x.shape[:2]
            cache = nc.InferenceParams(sequences, tokens, num_heads_kv=self.program["heads"] or 1,
                                       head_dim_k=self.program["head"] or 8, dtype=x.dtype)  # fmt: skip
            layer.eval()
            with torch.no_grad(), self.context():
                cache.allocate_memory(1)
                for at in range(tokens):
                    cache.pre_step({sequence: 1 for sequence in range(sequences)})
                    one = layer(x[at : at + 1], inference_params=cache, self_attn_mask_type="padding_causal",
                                attention_mask=torch.zeros(sequences, 1, 1, 1, dtype=torch.bool))  # fmt: skip
                    self.record("decoded", one)
            layer.train()

    # -- observers ---------------------------------------------------------------------------------------------------

    def observe(self, item: Program, place: str, x: Tensor | None = None) -> None:
        if not self.observed:
            return
        for observer in item["observers"]:
            if observer["place"] == place:
                _, error = attempt(lambda name=observer["name"]: getattr(self, f"_see_{name}")(x))
                if error is not None and not refusal(error):
                    raise error

    def _see_watch(self, x: Tensor | None) -> None:
        watch = nc.watch(self.model, every=1)
        self.watches.enter_context(watch)
        watch.step()

    def _see_bisect(self, x: Tensor | None) -> None:
        given = self.batch(1) if x is None else x.detach()
        nc.bisect(self.model, given, loss=lambda out: out.float().square().mean(), recipe="current")

    def _see_receipt(self, x: Tensor | None) -> None:
        str(nc.receipt(self.model))

    def _see_explain(self, x: Tensor | None) -> None:
        for module in self.model.modules():
            if isinstance(module, nc.ops.Sequential):
                with contextlib.redirect_stdout(io.StringIO()):
                    str(module.explain(self.recipe))

    def _see_state_dict(self, x: Tensor | None) -> None:
        torch.save(self.model.state_dict(), io.BytesIO())

    def _see_deepcopy(self, x: Tensor | None) -> None:
        twin = copy.deepcopy(self.model)
        with self.context():
            twin(self.batch(3)).float().sum().backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()

    def _see_pickle(self, x: Tensor | None) -> None:
        pickle.loads(pickle.dumps(self.model))

    def _see_repr(self, x: Tensor | None) -> None:
        str(self.model)

    def _see_evaluate(self, x: Tensor | None) -> None:
        self.model.eval()
        with torch.no_grad(), self.context():
            self.model(self.batch(4))
        self.model.train()

    def _see_recipes(self, x: Tensor | None) -> None:
        nc.get_recipes(self.model)

    def _see_optimizer(self, x: Tensor | None) -> None:
        copy.deepcopy(self.optimizer.state_dict())

    def _see_flops(self, x: Tensor | None) -> None:
        self.model.eval()
        with FlopCounterMode(display=False), torch.no_grad(), self.context():
            self.model(self.batch(5))
        self.model.train()

    def _see_hook(self, x: Tensor | None) -> None:
        for module in self.model.modules():
            module.register_forward_hook(_looks_on)


def run(program: Program) -> list[str]:
    if not program["layers"] or not program["history"]:
        raise Invalid("nothing happens")
    for described in program["layers"]:
        described["head"] = program["head"]
    invariant = bool(program["invariant"])
    nc.set_deterministic("batch-invariant" if invariant else None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(program)
    finally:
        nc.set_deterministic(None)


def _run(program: Program) -> list[str]:
    worlds = []
    for observed, options in ((False, True), (True, True), (False, False)):
        world, error = attempt(lambda o=observed, p=options: _performed(program, o, p))
        if error is not None and not refusal(error):
            raise error
        worlds.append((world, error))
    (plain, refused), (seen, seen_refused), (bare, _) = worlds
    if refused is not None or seen_refused is not None:
        if refused is None:
            raise Difference(f"an observer makes a later call raise: {said(seen_refused)}")  # type: ignore[arg-type]
        return [said(refused)]
    _compare(seen.trace, plain.trace, 0.0, "an observer changes")
    if bare is not None and (program["recipe"] or {}).get("family") in ("none", "current", "mxfp8", "block"):
        _compare(plain.trace, bare.trace, ROUGH, "options move")
    return []


def _performed(program: Program, observed: bool, options: bool) -> World:
    world = World(program, observed, options)
    world.perform()
    return world


def _compare(ours: list[Any], theirs: list[Any], tolerance: float, what: str) -> None:
    if tolerance:  # the first step alone: later ones start from other weights
        first = next((at for at, (label, _) in enumerate(theirs) if label == "random numbers"), len(theirs))
        kept = [
            {f"{label} {at}": value for at, (label, value) in enumerate(one[:first])}
            for one in (ours, theirs)
        ]
        if kept[0].keys() != kept[1].keys():
            return
        for label in kept[1]:
            a, b = kept[0][label], kept[1][label]
            if not torch.equal(a.isfinite(), b.isfinite()):
                raise Difference(f"{what} {label.rpartition(' ')[0]}: finite in other places")
            compare(a.float(), b.float(), f"{what} {label.rpartition(' ')[0]}", tolerance, least=1e-6)
        return
    if [label for label, _ in ours] != [label for label, _ in theirs]:
        raise Difference(f"{what} what there is: {len(ours)} and {len(theirs)} records")
    for (label, mine), (_, other) in zip(ours, theirs):
        compare(mine, other, f"{what} {label}")
