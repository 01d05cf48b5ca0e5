"""What each ``Linear`` of a plain run does, beside its products in fp64; under delayed scaling also to the rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.recipe import linear_plan

from .chains import columns_of
from .exact import Exact
from .programs import Difference

if TYPE_CHECKING:
    from .histories import World

# Largest relative error of a GEMM's output, and of its gradients: what the elements' bits allow, with room.
TOLERANCES = {
    "delayed": (0.08, 0.095),
    "current": (0.08, 0.15),  # gradients in E5M2, as below: 0.1 was seen of one that is nearly of rank 1
    "block": (0.08, 0.095),
    "hybrid": (0.08, 0.125),  # gradients in E5M2 blocks: of values that are alike, all may be an eighth off
    "mxfp8": (0.08, 0.095),
    "mxfp6": (0.2, 0.25),
    "mxfp4": (0.4, 0.4),
    "nvfp4": (0.4, 0.4),
    "none": (1e-5, 1e-5),
}
# Elements of FP4 below this part of their block's amax may become 0, however large what they multiply is.
LOST = {"mxfp4": 1 / 16, "nvfp4": 1 / 24}


class Product(NamedTuple):
    """A product in fp64, and the sums of its squared terms: where terms cancel, their roundings do not.

    ``decoded`` makes the product of what the operands are rounded to: what a format loses, such as the small rows of a
    block that has large ones, is no mistake. None in high precision, and under delayed scaling, whose operands
    :class:`.exact.Exact` knows.
    """

    value: Tensor
    squares: Tensor
    decoded: Callable[[], Tensor] | None = None

    @classmethod
    def of(cls, a: Tensor, b: Tensor, lost: float = 0.0) -> Product:
        if not lost or not a.numel() or not b.numel():
            return cls(a @ b, a.square() @ b.square())
        large_a = torch.maximum(a.abs(), lost * a.abs().amax(1, keepdim=True))
        large_b = torch.maximum(b.abs(), lost * b.abs().amax(0, keepdim=True))
        return cls(a @ b, large_a.square() @ large_b.square())

    def __add__(self, other: Product) -> Product:  # type: ignore[override]
        one, another = self.decoded, other.decoded
        decoded = None if one is None or another is None else lambda: one() + another()
        return Product(self.value + other.value, self.squares + other.squares, decoded)

    def size(self) -> Tensor:
        return torch.maximum(self.value.norm(), self.squares.sum().sqrt())


class Measure:
    """What each ``Linear`` does, beside its products in fp64.

    Delayed scaling is held to it where the scales that the steps before make suit the operands.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.wanted: dict[nn.Module, Product] = {}
        self.fitting: dict[nn.Module, bool] = {}
        self.steps = 0
        self.exact = Exact()
        for module in world.model.modules():
            if type(module) is nc.Linear:
                module.register_forward_hook(self.after)

    def forget(self) -> None:
        """Another recipe is in force, whose scales no call has told."""
        self.exact.forget()

    def recipe(self, layer: Any) -> Any:
        if self.world.outer is not None:
            return self.world.outer
        if self.world.program["how"] == "autocast" and self.world.recipe is not None:
            return self.world.recipe
        return layer.recipe

    def family(self, layer: Any) -> str:
        recipe = self.recipe(layer)
        if recipe is None:
            return "none"
        return {"float8_block": "block", "custom": "hybrid"}.get(recipe._family, recipe._family)

    def check(
        self, layer: Any, found: Tensor, wanted: Product, what: str, gradient: bool, fits: bool = True
    ) -> None:
        family = self.family(layer)
        tolerance = TOLERANCES.get(family, (0.4, 0.4))[gradient]
        if found.dtype == torch.bfloat16:
            tolerance = max(tolerance, 0.02)
        if family == "delayed":
            tolerance = 0.15
            if not fits:
                return
        size = wanted.size()
        if min(found.shape) < 8 or layer.in_features < 16 or size < 1e-20:
            return
        if not size < torch.finfo(found.dtype).max:  # a run that diverged
            return
        error = ((found.double() - wanted.value).norm() / size).item()
        if error > tolerance and wanted.decoded is not None:
            error, tolerance = ((found.double() - wanted.decoded()).norm() / size).item(), 0.02
        if not error <= tolerance:
            when = "a later step" if self.steps else "the first step"
            raise Difference(f"accuracy of {what} under {family} in {when}: off by {error:.3g}")

    def after(self, layer: Any, inputs: tuple[Tensor, ...], y: Any) -> None:
        x = inputs[0]
        if isinstance(layer.weight, nc.QuantizedTensor) or not isinstance(y, Tensor):
            return
        coded = isinstance(x, nc.QuantizedTensor)
        w_kept = layer.weight.detach().clone()
        values = x.dequantize() if coded else x  # kernels decode to no fp64
        x_kept = values.detach().reshape(-1, x.shape[-1]).clone()
        weight, wide, columns = w_kept.double(), x_kept.double(), columns_of(x)
        if columns is not None:  # of a hybrid they are not what its rows would be quantized to
            columns = columns.reshape(wide.shape).double()
        bias = layer.bias.detach().double() if layer.bias is not None else 0.0
        fits = coded or self.exact.suits(layer, "input", x_kept)
        lost = LOST.get(self.family(layer), 0.0)
        wanted = Product.of(wide, weight.t(), lost)
        wanted = wanted._replace(value=wanted.value + bias)
        plan = None
        if self.family(layer) not in ("none", "delayed") and wide.numel():
            plan = linear_plan(self.recipe(layer), "", True, True, module_type="linear")
            wanted = wanted._replace(
                decoded=lambda: _decoded(plan.input, x_kept) @ _decoded(plan.weight, w_kept).t() + bias
            )
        self.check(layer, y.detach().reshape(-1, y.shape[-1]), wanted, "a product", False, fits)
        exact = None
        if self.family(layer) == "delayed":
            exact = self.exact.forward(layer, self.recipe(layer), x, y)
        if not y.requires_grad:
            return

        def seen(dy: Tensor) -> None:
            dy_kept = dy.detach().reshape(-1, dy.shape[-1]).clone()
            flat = dy_kept.double()
            part = Product.of(flat.t(), wide, lost)
            if plan is not None and flat.numel():

                def decoded() -> Tensor:
                    x_columns = _decoded(plan.input, x_kept, True) if columns is None else columns
                    return _decoded(plan.grad_output, dy_kept, True).t() @ x_columns

                part = part._replace(decoded=decoded)
            self.wanted[layer] = self.wanted[layer] + part if layer in self.wanted else part
            fit = fits and self.exact.suits(layer, "grad_output", dy_kept)
            self.fitting[layer] = self.fitting.get(layer, True) and fit
            if exact is not None:
                exact[0](dy)
            if x.requires_grad:
                of_input = Product.of(flat, weight, lost)
                if plan is not None and flat.numel():
                    of_input = of_input._replace(
                        decoded=lambda: (
                            _decoded(plan.grad_output, dy_kept) @ _decoded(plan.weight, w_kept, True)
                        )
                    )
                x_grads.append((of_input, fit))

        x_grads: list[tuple[Product, bool]] = []

        def seen_x(dx: Tensor) -> None:
            if exact is not None:
                exact[1](dx)
            if x_grads:
                grads, fit = x_grads[-1]
                self.check(layer, dx.detach().reshape(-1, dx.shape[-1]), grads, "dgrad", True, fit)

        y.register_hook(seen)
        if x.requires_grad and x.grad_fn is not None:
            x.register_hook(seen_x)

    def end_of_step(self) -> None:
        for layer, wanted in self.wanted.items():
            if layer.weight.requires_grad and layer.weight.grad is not None:
                self.check(layer, layer.weight.grad.detach(), wanted, "wgrad", True, self.fitting[layer])
        self.exact.end_of_step()
        self.wanted, self.fitting = {}, {}
        self.steps += 1

    def renew(self) -> None:
        """The optimizer has stepped."""
        self.exact.renew()

    def start_of_step(self) -> None:
        """Forget gradients that were thrown away."""
        self.wanted, self.fitting = {}, {}
        self.exact.start_of_step()


def _decoded(operand: Any, values: Tensor, columnwise: bool = False) -> Tensor:
    """What a matrix is rounded to in one direction."""
    quantizer = operand.quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise)
    return quantizer(values).dequantize().double()
