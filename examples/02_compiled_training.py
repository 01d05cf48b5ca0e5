"""A training loop compiled into one graph, in bf16 and in FP8 with delayed scaling."""

import torch

import narrowcast as nc


def make_model(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        nc.Linear(64, 256, device=device), torch.nn.GELU(), nc.Linear(256, 64, device=device)
    )


def train(recipe: nc.recipe.Recipe | None, steps: int = 60) -> list[float]:
    """Learn to sort numbers; return the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(device)
    forward = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(128, 64, device=device)
        # Delayed scaling renews its scales in optimizer.step(), outside the graph.
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = forward(x)
        loss = torch.nn.functional.mse_loss(y, x.sort(dim=-1).values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    plain = train(None)
    delayed = train(nc.recipe.DelayedScaling(amax_history_len=16, emulate=not nc.is_fp8_available()))
    print(" step  high precision  FP8 delayed")
    for step in range(0, len(plain), 10):
        print(f"{step:5d} {plain[step]:15.4f} {delayed[step]:12.4f}")


if __name__ == "__main__":
    main()
