"""The feed-forward block of a Transformer: saved bytes of a fused module, with and without recomputation."""

import torch

import narrowcast as nc

TOKENS, HIDDEN, FFN = 512, 128, 384


def make_block(checkpoint: bool) -> nc.LayerNormMLP:
    torch.manual_seed(0)
    return nc.LayerNormMLP(
        HIDDEN,
        FFN,
        normalization="RMSNorm",
        activation="swiglu",
        checkpoint=checkpoint,
        params_dtype=torch.bfloat16,
        device="cpu",
    )


def step(recipe: nc.recipe.Recipe | None, checkpoint: bool) -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that the forward saved besides the parameters, and the gradients."""
    block = make_block(checkpoint)
    parameters = {parameter.data_ptr() for parameter in block.parameters()}
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        nc.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        y = block(x)
    y.float().square().mean().backward()
    return sum(saved.values()), [x.grad, *(parameter.grad for parameter in block.parameters())]


def main() -> None:
    recipes = {"high precision": None, "MXFP8": nc.recipe.MXFP8BlockScaling(emulate=True)}
    for name, recipe in recipes.items():
        kept, gradients = step(recipe, checkpoint=False)
        kept_again, recomputed = step(recipe, checkpoint=True)
        same = all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))
        print(
            f"{name:14s} saves {kept >> 10:4d} KiB; with checkpoint {kept_again >> 10:4d} KiB, same gradients: {same}"
        )


if __name__ == "__main__":
    main()
