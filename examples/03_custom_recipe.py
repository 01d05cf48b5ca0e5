"""A custom recipe: a factory that chooses a quantizer for each operand of each layer."""

import torch

import narrowcast as nc


def careful_at_the_end(role: nc.QuantizerRole) -> nc.Quantizer:
    """MXFP8 forward, E5M2 per tensor for gradients; the layer named "head" stays unquantized."""
    if role.name == "head":
        return nc.IdentityQuantizer()
    if role.tensor_type in ("grad_output", "grad_input"):
        return nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E5M2)
    return nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)


# Built once: two custom recipes are equal only if they hold the same factory object.
RECIPE = nc.recipe.CustomRecipe(qfactory=careful_at_the_end, emulate=True)


def main() -> None:
    torch.manual_seed(0)
    body = nc.Linear(128, 128, name="body", device="cpu")
    head = nc.Linear(128, 10, name="head", device="cpu")
    x = torch.randn(32, 128)

    for layer in (body, head):
        with nc.autocast(recipe=RECIPE):
            y = layer(x)
        y.sum().backward()
        exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
        print(f"{layer.name}: largest difference to full precision {(y - exact).abs().max().item():.2e}")


if __name__ == "__main__":
    main()
