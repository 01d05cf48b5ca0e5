"""A Vision Transformer, trained in FP8 to tell shapes apart: patches, a class token, pre-norm encoder blocks.

The blocks are two fused modules each, `nc.LayerNormLinear` in front of the attention and `nc.LayerNormMLP`, with
PyTorch's attention between them. First and last linear layer, the patches' and the classes', stay in high precision.

Run: python examples/13_vision_transformer.py
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = ("square", "cross", "stripes")


@dataclass(frozen=True)
class Config:
    """A shape; that of ViT-B/16 is ``Config(224, 16, 3, 1000, 768, 3072, 12, 12)``."""

    image: int = 32
    patch: int = 8
    channels: int = 1
    classes: int = len(CLASSES)
    width: int = 64
    hidden: int = 256
    depth: int = 2
    heads: int = 4


class Block(nn.Module):
    """Attention over all patches, then a feed-forward layer; each adds to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nc.LayerNormLinear(config.width, 3 * config.width, eps=1e-6, device=DEVICE)
        self.proj = nc.Linear(config.width, config.width, device=DEVICE)
        self.mlp = nc.LayerNormMLP(config.width, config.hidden, eps=1e-6, activation="gelu", device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class VisionTransformer(nn.Module):
    """Images (batch, channels, height, width) to scores (batch, classes)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch = config.patch
        count = (config.image // config.patch) ** 2
        self.embedding = nc.Linear(config.channels * config.patch**2, config.width, device=DEVICE)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width, device=DEVICE))
        self.positions = nn.Parameter(torch.randn(1, 1 + count, config.width, device=DEVICE) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nc.LayerNorm(config.width, eps=1e-6, device=DEVICE)
        self.head = nc.Linear(config.width, config.classes, device=DEVICE)

    def forward(self, images: Tensor) -> Tensor:
        # A convolution without overlapping windows is a linear layer on each window.
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        x = self.embedding(patches)
        x = torch.cat([self.class_token.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def draw(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of one shape each: (count, 1, size, size), and their classes (count,)."""
    images = 0.3 * torch.randn(count, 1, size, size)
    labels = torch.randint(len(CLASSES), (count,))
    corners = torch.randint(2, size - 14, (count, 2)).tolist()
    for image, label, (top, left) in zip(images[:, 0], labels.tolist(), corners, strict=True):
        place = image[top : top + 12, left : left + 12]
        if CLASSES[label] == "square":
            place[[0, 1, -2, -1]] += 1.0
            place[:, [0, 1, -2, -1]] += 1.0
        elif CLASSES[label] == "cross":
            place[5:7] += 1.0
            place[:, 5:7] += 1.0
        else:
            place[::3] += 1.0
    return images.to(DEVICE), labels.to(DEVICE)


def main() -> None:
    torch.manual_seed(0)
    config = Config()
    model = VisionTransformer(config)
    nc.set_recipe(model, {"blocks": nc.recipe.Float8CurrentScaling()})  # embedding and head have none
    run = torch.compile(model, fullgraph=True) if DEVICE == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for step in range(1, 61):
        images, labels = draw(64, config.image)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):  # weights stay in fp32
            loss = F.cross_entropy(run(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}  loss {loss.item():.3f}")
    model.eval()
    images, labels = draw(256, config.image)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        right = (model(images).argmax(-1) == labels).float().mean()
    print(f"right of 256 new images: {right:.0%}")


if __name__ == "__main__":
    main()
