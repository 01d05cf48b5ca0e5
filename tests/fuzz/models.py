"""Models that programs describe: of our layers, and the same of PyTorch's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import narrowcast as nc

from . import programs
from .programs import Program

R = nc.recipe
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WITH_WEIGHTS = ("linear", "linear", "linear", "lnlinear", "lnmlp", "grouped", "ops", "transformer")
OTHERS = ("relu", "relu_", "noise", "norm", "ournorm", "sdpa", "again", "residual")


def draw_recipe(rng: random.Random, families: tuple[str, ...] = ()) -> Program:
    """A recipe with options that reproduces its bits."""
    family = rng.choice(
        families
        or ("delayed",) * 5
        + ("current", "current", "mxfp8", "block", "nvfp4", "mxfp6", "mxfp4", "hybrid", "none")
    )
    options: dict[str, Any] = {}
    if family == "delayed":
        options = {
            "amax_history_len": rng.choice((1, 2, 4, 16)),
            "amax_compute_algo": rng.choice(("max", "most_recent")),
            "initial_scale": rng.choice(("range", "range", "one")),
        }
    elif family in ("mxfp8", "mxfp6", "mxfp4"):
        options = {"enable_2d_quantization": rng.random() < 0.3}
    elif family == "nvfp4":
        options = {
            "disable_stochastic_rounding": True,
            "disable_rht": rng.random() < 0.5,
            "disable_2d_quantization": rng.random() < 0.5,
        }
    elif family == "current":
        options = {"use_power_2_scales": rng.random() < 0.3}
    if family not in ("none", "hybrid", "delayed") and rng.random() < 0.15:
        options["backward_override"] = rng.choice(("high_precision", "dequantized"))
    return {"family": family, "options": options}


def _hybrid(role: nc.QuantizerRole) -> Any:
    if role.tensor_type in ("grad_output", "grad_input"):
        return nc.MXFP8Quantizer(nc.DType.kFloat8E5M2)
    return nc.HybridQuantizer(
        rowwise_quantizer=nc.MXFP8Quantizer(nc.DType.kFloat8E4M3),
        columnwise_quantizer=nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3),
    )


FAMILIES: dict[str, Callable[..., Any]] = {
    "delayed": R.DelayedScaling,
    "current": R.Float8CurrentScaling,
    "mxfp8": R.MXFP8BlockScaling,
    "mxfp6": R.MXFP6BlockScaling,
    "mxfp4": R.MXFP4BlockScaling,
    "block": R.Float8BlockScaling,
    "nvfp4": R.NVFP4BlockScaling,
    "hybrid": lambda **options: R.CustomRecipe(qfactory=_hybrid, **options),
}


def recipe_of(described: Program | None) -> Any:
    if described is None or described["family"] == "none":
        return None
    options = {name: value for name, value in (described["options"] or {}).items() if value is not None}
    return FAMILIES[described["family"]](**options)


def draw_layer(rng: random.Random, index: int) -> Program:
    if rng.random() < 0.6:
        kind = rng.choice(WITH_WEIGHTS)
        layer: Program = {"kind": kind, "bias": rng.random() < 0.5}
        if rng.random() < 0.25:
            layer["own"] = draw_recipe(rng)
        if kind in ("lnmlp", "ops"):
            layer["n"] = rng.choice((16, 32, 48, 17, 1))
        if kind in ("lnlinear", "lnmlp"):
            layer["norm"] = rng.choice(("LayerNorm", "RMSNorm"))
        if kind == "lnmlp":
            layer["activation"] = rng.choice(("gelu", "relu", "swiglu", "geglu"))
        if kind == "ops":
            layer["ops"] = rng.sample(
                ("norm", "linear", "gelu", "relu", "quantize", "quantize_grad", "bias"), rng.randint(1, 5)
            )
        return layer
    kind = rng.choice(OTHERS)
    if kind == "again":
        return {"kind": kind, "of": rng.randrange(max(index, 1))}
    return {"kind": kind}


class Noise(nn.Module):
    """A random operator that changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand_like(x)


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(1, -1, 2, x.shape[-1] // 2).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + y.transpose(1, 2).reshape(x.shape)


class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(x)


class Grouped(nn.Module):
    def __init__(self, features: int, bias: bool, place: dict[str, Any], own: Any) -> None:
        super().__init__()
        self.layer = nc.GroupedLinear(2, features, features, bias=bias, recipe=own, **place)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        half = flat.shape[0] // 2
        y = self.layer(flat, [half, flat.shape[0] - half], **options)
        return y.reshape(x.shape)


class Transformer(nn.Module):
    def __init__(self, features: int, place: dict[str, Any], own: Any) -> None:
        super().__init__()
        self.layer = nc.TransformerLayer(
            features,
            2 * features,
            2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            params_dtype=place["dtype"],
            device=place["device"],
        )
        if own is not None:
            nc.set_recipe(self.layer, own)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.layer(x.reshape(-1, 1, x.shape[-1]), **options).reshape(x.shape)


def _ops(described: Program, features: int, place: dict[str, Any]) -> nn.Module:
    width, parts = features, []
    for name in described["ops"] or ():
        if name == "linear":
            wide = described["n"] if width == features else features
            parts.append(nc.ops.Linear(width, wide, bias=bool(described["bias"]), **place))
            width = wide
        elif name == "norm":
            parts.append(nc.ops.LayerNorm(width, **place))
        elif name == "bias":
            parts.append(nc.ops.Bias(width, **place))
        elif name in ("quantize", "quantize_grad"):
            parts.append(nc.ops.Quantize(name == "quantize", name != "quantize", device=place["device"]))
        else:
            parts.append({"gelu": nc.ops.GELU, "relu": nc.ops.ReLU}[name]())
    if width != features:
        parts.append(nc.ops.Linear(width, features, bias=False, **place))
    return nc.ops.Sequential(*parts)


def _ours(layer: Program, features: int, place: dict[str, Any]) -> nn.Module:
    kind, own, bias = layer["kind"], recipe_of(layer.get("own")), bool(layer.get("bias"))
    if kind == "linear":
        return nc.Linear(features, features, bias=bias, recipe=own, **place)
    if kind == "lnlinear":
        return nc.LayerNormLinear(
            features, features, bias=bias, recipe=own, normalization=layer.get("norm") or "LayerNorm", **place
        )
    if kind == "lnmlp":
        return nc.LayerNormMLP(
            features,
            layer.get("n") or 16,
            bias=bias,
            recipe=own,
            normalization=layer.get("norm") or "LayerNorm",
            activation=layer.get("activation") or "gelu",
            **place,
        )
    if kind == "grouped":
        return Grouped(features, bias, place, own)
    if kind == "transformer":
        if features % 2:  # heads do not fit: what does is the same block without attention
            return nc.LayerNormMLP(features, 16, bias=bias, recipe=own, **place)
        return Transformer(features, place, own)
    if kind == "ops":
        module = _ops(layer, features, place)
        if own is not None:
            nc.set_recipe(module, own)
        return module
    if kind == "ournorm":
        return nc.LayerNorm(features, **place)
    return _others(layer, features, place)


def _others(layer: Program, features: int, place: dict[str, Any]) -> nn.Module:
    kind = layer["kind"]
    if kind == "sdpa" and features % 2:
        kind = "residual"
    makers: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU,
        "relu_": lambda: nn.ReLU(inplace=True),
        "noise": Noise,
        "sdpa": Attend,
        "residual": Residual,
        "norm": lambda: nn.LayerNorm(features, **place),
    }
    return makers[kind]()


class Reshaped(nn.Sequential):
    """As ``Grouped`` and ``Transformer`` do: what they return is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _theirs(layer: Program, features: int, place: dict[str, Any]) -> nn.Module:
    """What stands for the layer in a model of PyTorch's own: of its shape and its ways, not of its values."""
    kind = layer["kind"]
    linear = nn.Linear(features, features, **place)
    if kind in ("linear", "ops"):
        return linear
    if kind == "grouped":
        return Reshaped(linear)
    if kind in ("lnlinear", "lnmlp", "transformer"):
        view = kind == "transformer" and not features % 2
        return (Reshaped if view else nn.Sequential)(nn.LayerNorm(features, **place), linear)
    if kind == "ournorm":
        return nn.LayerNorm(features, **place)
    return _others(layer, features, place)


TAKES_FLAG = (nc.Linear, nc.LayerNormLinear, nc.LayerNormMLP, Grouped, Transformer)


class Block(nn.Module):
    """Layers one after another, some of them run again.

    Args:
        decodes: do as a graph does, in which a list of operations that ends in ``Quantize`` passes on decoded values:
            in the model's forward, and called alone.
    """

    def __init__(self, layers: list[tuple[Program, nn.Module]], decodes: tuple[bool, bool]) -> None:
        super().__init__()
        self.decodes, self.decodes_alone = decodes
        self.described = [layer for layer, _ in layers]
        self.layers = nn.ModuleList(module for _, module in layers)

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        for module in self.layers:
            if first is not None and isinstance(module, TAKES_FLAG):
                x = module(x, is_first_microbatch=first)
            else:
                x = module(x)
            if self.decodes and isinstance(x, nc.QuantizedTensor):
                x = x.dequantize()
        return x


def wrapped(run: Callable[..., Tensor], wrap: Program | None, torchs: bool = False) -> Callable[..., Tensor]:
    """What calls a part of the model, or all of it, in place of a plain call."""
    if not wrap:
        return run

    def checkpointed(inner: Callable[..., Tensor], how: str) -> Callable[..., Tensor]:
        outer = nc.checkpoint if how.startswith("ours") and not torchs else checkpoint
        options: dict[str, Any] = {"use_reentrant": how.endswith("reentrant")}
        if how.endswith("selective"):
            options["context_fn"] = _save_some
        if how.endswith("whole"):
            options["early_stop"] = False

        def call(x: Tensor, first: bool | None = None) -> Tensor:
            if wrap.get("keywords") and outer is nc.checkpoint:
                return outer(inner, x, first=first, **options)
            return outer(inner, x, first, **options)

        return call

    if wrap.get("inner"):
        run = checkpointed(run, wrap["inner"])
    if wrap.get("checkpoint") and wrap.get("inside"):
        run = checkpointed(run, wrap["checkpoint"])
    if wrap.get("compile"):
        run = torch.compile(run, backend=wrap["compile"], fullgraph=bool(wrap.get("fullgraph")))
    if wrap.get("checkpoint") and not wrap.get("inside"):
        run = checkpointed(run, wrap["checkpoint"])
    return _saved_on_cpu(run) if wrap.get("offload") else run


def _save_some() -> Any:
    """Save products, and the results of some of our operators, by name, and recompute the others."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        saves = "mm" in name or (name.startswith("narrowcast") and len(name) % 2)
        return CheckpointPolicy.PREFER_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _saved_on_cpu(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, first: bool | None = None) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return run(x, first)

    return call


def draw_wrap(rng: random.Random, inductor: float) -> Program | None:
    if rng.random() < 0.35:
        return None
    compiled = None
    if rng.random() < 0.6:
        compiled = "inductor" if rng.random() < inductor else "aot_eager"
    how = rng.choice((None, "torch", "torch", "torch reentrant", "ours", "ours reentrant"))
    inside = compiled is not None and rng.random() < 0.4
    if inside and how is not None:
        how = how.split()[0]
    return {
        "compile": compiled,
        "fullgraph": rng.random() < 0.6,
        "checkpoint": how,
        "inside": inside,
        "keywords": rng.random() < 0.3,
    }


class Model(nn.Module):
    """Blocks, each called as its wrapping says."""

    def __init__(self, program: Program, plain: bool, torchs: bool = False) -> None:
        super().__init__()
        features, dtype = program["features"] or 16, DTYPES[program["dtype"] or "float32"]
        place: dict[str, Any] = {"device": programs.DEVICE, "dtype": dtype}
        make = _theirs if torchs else _ours
        blocks, made = [], []
        for described in program["blocks"]:
            layers: list[tuple[Program, nn.Module]] = []
            for layer in described["layers"]:
                if layer["kind"] == "again":
                    known = [module for module in made if any(True for _ in module.parameters())]
                    module = known[(layer["of"] or 0) % len(known)] if known else Residual()
                else:
                    module = make(layer, features, place)
                    made.append(module)
                layers.append((layer, module))
            whole, own = [
                bool(wrap and wrap.get("compile")) for wrap in (program["whole"], described.get("wrap"))
            ]
            blocks.append(Block(layers, decodes=(plain and (whole or own), plain and own)))
        self.blocks = nn.ModuleList(blocks)
        self.wraps = [None if plain else described.get("wrap") for described in program["blocks"]]
        self.torchs = torchs
        self.rewrap()

    def rewrap(self) -> None:
        """Wrap what the blocks are now: a copy of a model would call the blocks of the original."""
        self.__dict__["run"] = [
            wrapped(block, wrap, self.torchs) for block, wrap in zip(self.blocks, self.wraps)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        import copy

        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            if name != "run":
                twin.__dict__[name] = copy.deepcopy(value, memo)
        twin.rewrap()
        return twin

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        for run in self.run:
            x = run(x, first)
        return x

    def call_parts(self, x: Tensor, first: bool | None = None) -> Tensor:
        """Call the blocks one by one, without what is around the model."""
        kept = [block.decodes for block in self.blocks]
        for block in self.blocks:
            block.decodes = block.decodes_alone
        try:
            return self.forward(x, first)
        finally:
            for block, decodes in zip(self.blocks, kept):
                block.decodes = decodes
