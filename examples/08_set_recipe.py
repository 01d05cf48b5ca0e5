"""Recipes that belong to the layers: given by pattern, recomputed by torch's checkpoint, overridden by autocast.

Run: python examples/08_set_recipe.py
"""

import torch
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

# A GPU without the format's tensor cores needs emulate=True; a CPU always emulates.
EMULATE = torch.cuda.is_available()


class Model(torch.nn.Module):
    """Residual feed-forward blocks and a head, with the blocks recomputed in the backward."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(nc.LayerNormMLP(width, 4 * width) for _ in range(depth))
        self.head = nc.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(64, 3, 10)
    nc.set_recipe(
        model,
        {
            "layers.*": nc.recipe.MXFP8BlockScaling(emulate=EMULATE),
            "layers.0": nc.recipe.DelayedScaling(amax_history_len=16, emulate=EMULATE),
            "head": None,  # the head stays in high precision
        },
    )
    print(nc.recipe.recipes_to_json(nc.get_recipes(model)))
    print("state of delayed scaling:", [name for name, _ in model.named_buffers()][:3], "...")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 64, device=device)
    target = x[:, :10].argmax(dim=1)
    for step in range(10):
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()  # recomputes every block under the recipe of its forward
        # on several ranks: nc.reduce_delayed_scaling(model)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"step {step}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        low = model(x)
        with nc.autocast(enabled=False):  # wins over the layers' own recipes
            high = model(x)
    print(f"error of low precision: {((low - high).norm() / high.norm()).item():.4f}")


if __name__ == "__main__":
    main()
