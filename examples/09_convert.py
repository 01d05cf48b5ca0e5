"""An existing model, converted in place: the receipt, a few steps, the GEMMs that ran, and back.

Run: python examples/09_convert.py
"""

import torch

import narrowcast as nc

# A GPU without the format's tensor cores needs emulate=True; a CPU always emulates.
RECIPE = nc.recipe.MXFP8BlockScaling(emulate=torch.cuda.is_available())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 64),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.nn.Linear(64, 100),
    ).to(device)
    keys = list(model.state_dict())

    nc.convert(model, RECIPE, skip="2")  # the last layer stays in high precision
    receipt = nc.receipt(model)
    print(receipt)
    receipt.assert_coverage(0.5)
    assert list(model.state_dict()) == keys

    words = torch.randint(100, (16, 32), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        with receipt.recording():
            loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")
    print(receipt.ran())

    nc.revert(model)
    assert type(model[1].layers[0].linear1) is torch.nn.Linear


if __name__ == "__main__":
    main()
