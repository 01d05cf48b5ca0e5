"""One linear layer, forward and backward, in every recipe: how far is each from full precision?"""

import torch

import narrowcast as nc

RECIPES = (
    nc.recipe.DelayedScaling(emulate=True),
    nc.recipe.Float8CurrentScaling(emulate=True),
    nc.recipe.MXFP8BlockScaling(emulate=True),
    nc.recipe.Float8BlockScaling(emulate=True),
    nc.recipe.NVFP4BlockScaling(emulate=True),
)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got - exact).norm() / exact.norm()).item()


def main() -> None:
    torch.manual_seed(0)
    layer = nc.Linear(256, 512, bias=False, device="cpu")
    x = torch.randn(100, 256, requires_grad=True)
    dy = torch.randn(100, 512)
    exact = (x @ layer.weight.T, dy @ layer.weight, dy.T @ x)

    print(f"{'recipe':24s} {'output':>8s} {'dgrad':>8s} {'wgrad':>8s}   relative error")
    for recipe in RECIPES:
        x.grad = layer.weight.grad = None
        with nc.autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
        errors = [error(got, want) for got, want in zip((y, x.grad, layer.weight.grad), exact, strict=True)]
        print(f"{type(recipe).__name__:24s} " + " ".join(f"{value:8.4f}" for value in errors))


if __name__ == "__main__":
    main()
