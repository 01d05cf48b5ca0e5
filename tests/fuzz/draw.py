"""What a case draws from its seed: shapes, dtypes, values, recipes, layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import narrowcast as nc

T = TypeVar("T")
R = nc.recipe
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EDGES = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 255, 256, 257)
KINDS = ("normal", "normal", "wide", "outliers", "zeros", "tiny", "large")
ACTIVATIONS = ("gelu", "relu", "silu", "geglu", "swiglu", "reglu", "srelu")


@dataclass
class Draw:
    """The random choices of one case.

    ``effort``: how long cases that may be long should be; 1 is that of an hour's run.
    """

    suite: str
    seed: int
    device: str
    effort: float = 1.0

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.suite} {self.seed}")
        torch.manual_seed(self.seed)
        self.notes: list[str] = []
        self.quantized = False

    def note(self, what: str, value: T) -> T:
        """Keep what was drawn for the report of a failure."""
        self.notes.append(f"{what}={value}")
        return value

    def pick(self, what: str, choices: Sequence[T]) -> T:
        return self.note(what, self.random.choice(choices))

    def chance(self, what: str, probability: float = 0.5) -> bool:
        return self.note(what, self.random.random() < probability)

    def size(self, what: str, largest: int = 257) -> int:
        """Half of the time a size at an edge of some tile."""
        edges = [edge for edge in EDGES if edge <= largest]
        if self.random.random() < 0.5:
            return self.note(what, self.random.choice(edges))
        return self.note(what, self.random.randint(1, largest))

    def lead(self, rows: int) -> tuple[int, ...]:
        """Leading dimensions of so many rows."""
        for divisor in (2, 3, 5):
            if rows % divisor == 0 and self.random.random() < 0.3:
                return (divisor, rows // divisor)
        return (rows,)

    def dtype(self) -> torch.dtype:
        return self.pick("dtype", DTYPES)

    def values(self, what: str, shape: Sequence[int], dtype: torch.dtype, kind: str | None = None) -> Tensor:
        """Finite values of one kind, in any memory format, on the device."""
        kind = kind or self.pick(f"{what} values", KINDS)
        x = torch.randn(*shape)
        if kind == "wide":
            x = x * torch.exp2(torch.randint(-10, 11, x.shape).float())
        elif kind == "outliers":
            x = torch.where(torch.rand(x.shape) < 0.01, 200 * x, x)
        elif kind == "zeros":
            x = torch.where(torch.rand(x.shape) < 0.7, torch.zeros_like(x), x)
            x[..., : shape[-1] // 2] = -0.0
        elif kind == "tiny":
            x = x * 2.0**-14
        elif kind == "large":
            x = x * 64
        x = x.to(dtype).to(self.device)
        if len(shape) == 2 and self.random.random() < 0.2:
            self.note(f"{what} strided", True)
            x = x.t().contiguous().t()
        return x

    def emulate(self) -> bool:
        """Emulated where the machine may lack the format; everything is, on CPUs."""
        return self.device != "cpu"

    def recipe(self, *, with_none: bool = False, stochastic: bool = True) -> R.Recipe | None:
        """A recipe with random options."""
        families = ["delayed", "current", "block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "custom"]
        family = self.pick("recipe", families + ["none"] * with_none)
        flip, emulate = self.random.random, self.emulate()
        self.quantized = family != "none"
        if family == "none":
            return None
        if family == "delayed":
            return R.DelayedScaling(
                margin=self.random.choice((0, 0, 1)),
                amax_history_len=self.random.choice((1, 4, 16)),
                amax_compute_algo=self.random.choice(("max", "most_recent")),
            )
        if family == "current":
            return R.Float8CurrentScaling(use_power_2_scales=flip() < 0.3)
        if family == "block":
            return R.Float8BlockScaling()
        if family == "mxfp8":
            return R.MXFP8BlockScaling(enable_2d_quantization=flip() < 0.3, emulate=emulate)
        if family == "mxfp6":
            return R.MXFP6BlockScaling(enable_2d_quantization=flip() < 0.3, emulate=emulate)
        if family == "mxfp4":
            return R.MXFP4BlockScaling(enable_2d_quantization=flip() < 0.3, emulate=emulate)
        if family == "nvfp4":
            return R.NVFP4BlockScaling(
                disable_rht=flip() < 0.3,
                disable_2d_quantization=flip() < 0.3,
                disable_stochastic_rounding=not stochastic or flip() < 0.5,
                emulate=emulate,
            )
        return R.CustomRecipe(qfactory=_mixed, emulate=emulate)

    def layer(self, features: int, recipe: R.Recipe | None, dtype: torch.dtype) -> nn.Module:
        """A layer that maps (*, features) to some (*, n), with biases and norms that are not 0 and 1."""
        if recipe is not None and self.chance("quantized weights", 0.15):
            with nc.quantized_model_init(recipe=recipe):
                module = self._layer(features, recipe, dtype)
        else:
            module = self._layer(features, recipe, dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn(parameter.shape, device=self.device).to(dtype))
        return module

    def _layer(self, features: int, recipe: R.Recipe | None, dtype: torch.dtype) -> nn.Module:
        kind = self.pick("layer", ("Linear", "LayerNormLinear", "LayerNormMLP", "Sequential"))
        n, bias = self.size("n", 160), self.chance("bias")
        place: dict[str, Any] = {"device": self.device, "dtype": dtype}
        own: dict[str, Any] = {**place, "recipe": recipe, "bias": bias}
        norm = self.pick("norm", ("LayerNorm", "RMSNorm"))
        if kind == "Linear":
            return nc.Linear(features, n, **own)
        if kind == "LayerNormLinear":
            return nc.LayerNormLinear(features, n, normalization=norm, **own)
        if kind == "LayerNormMLP":
            activation, again = self.pick("activation", ACTIVATIONS), self.chance("checkpoint", 0.3)
            return nc.LayerNormMLP(
                features, n, normalization=norm, activation=activation, checkpoint=again, **own
            )
        module = nc.ops.Sequential(
            getattr(nc.ops, norm)(features, **place),
            nc.ops.Linear(features, n, bias=bias, **place),
            nc.ops.GELU(),
            nc.ops.Linear(n, features, bias=bias, **place),
        )
        nc.set_recipe(module, recipe)
        return module


def _mixed(role: nc.QuantizerRole) -> nc.Quantizer:
    """MXFP8 forward in tiles for weights, current scaling for gradients."""
    if role.tensor_type in ("grad_output", "grad_input"):
        return nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E5M2)
    if role.tensor_type == "weight":
        return nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
    return nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3, force_pow_2_scales=True)


def gradients(module: nn.Module, x: Tensor, dy: Tensor, *args: Any, seed: int = 7) -> list[Tensor]:
    """Output, gradient of the input and of every parameter of one step; random rounding repeats."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_(True)
    y = module(x, *args)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def assert_same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], what: str) -> None:
    """Every bit, but for what kind of NaN it is."""
    assert len(ours) == len(theirs), what
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert a is b, f"{what}: result {index} is {type(a).__name__} and {type(b).__name__}"
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{what}: {index}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        )
        if not torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30)):
            difference = (a.double() - b.double()).abs().nan_to_num().max().item()
            raise AssertionError(f"{what}: result {index} differs by {difference:.3e}")
