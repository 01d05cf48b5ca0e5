"""A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU; trained in FP8, then asked for a continuation.

Every block is one `nc.TransformerLayer`, so that norms and activations quantize what they compute for the GEMM behind
them. Generation keeps keys and values in a cache.

Run: python examples/12_llama.py
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Config:
    """A shape; that of Llama 3 8B is ``Config(128256, 4096, 14336, 32, 32, 8, 8192, 500_000.0)``."""

    vocabulary: int = 256
    width: int = 128
    hidden: int = 352
    depth: int = 2
    heads: int = 4
    groups: int = 2  # of query heads: each has one head of keys and values
    longest: int = 128
    rope_base: float = 10_000.0


class Llama(nn.Module):
    """Tokens (batch, length) to scores of the next one (batch, length, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        place = {"device": DEVICE, "dtype": torch.bfloat16}
        self.embedding = nn.Embedding(config.vocabulary, config.width, **place)
        self.layers = nn.ModuleList(self._layer(number) for number in range(1, config.depth + 1))
        self.norm = nc.RMSNorm(config.width, **place)
        self.head = nc.Linear(config.width, config.vocabulary, bias=False, **place)
        rope = nc.RotaryPositionEmbedding(config.width // config.heads, rotary_base=config.rope_base)
        self.register_buffer("angles", rope.to(DEVICE)(config.longest), persistent=False)

    def _layer(self, number: int) -> nc.TransformerLayer:
        config = self.config
        return nc.TransformerLayer(
            config.width,
            config.hidden,
            config.heads,
            num_gqa_groups=config.groups,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
            layer_number=number,  # of its keys and values in the cache
            device=DEVICE,
            dtype=torch.bfloat16,
        )

    def forward(self, tokens: Tensor, cache: nc.InferenceParams | None = None) -> Tensor:
        options = {}
        if cache is not None:
            options = {"inference_params": cache, "self_attn_mask_type": "padding_causal"}
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, **options)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token; a batch is (sequences, length + 1)."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.inference_mode()
def generate(model: Llama, prompt: Tensor, count: int) -> list[int]:
    """Return the likeliest continuation of a prompt (length,), token by token."""
    cache = nc.InferenceParams(1, model.config.longest, device=DEVICE)
    new, answer = prompt[None], []
    for _ in range(count):
        cache.pre_step({"answer": new.shape[1]})  # the prompt first, then one token at a time
        new = model(new, cache)[:, -1:].argmax(-1)
        answer.append(int(new))
    return answer


def main() -> None:
    torch.manual_seed(0)
    model = Llama(Config())
    # The head's error affects the loss directly, and its share of the work is small: it stays in bf16.
    nc.set_recipe(model, {"": nc.recipe.Float8CurrentScaling(), "head": None})
    run = torch.compile(model, fullgraph=True) if DEVICE == "cuda" else model
    # bf16 weights lose small updates; the optimizer keeps fp32 copies.
    optimizer = nc.optimizers.FusedAdam(model.parameters(), lr=4e-3, master_weights=True)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=DEVICE)
    for step in range(1, 61):
        starts = torch.randint(len(text) - 65, (8, 1), device=DEVICE)
        loss = loss_of(run, text[starts + torch.arange(65, device=DEVICE)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}  loss {loss.item():.3f}")
    model.eval()
    prompt = text[:32]
    print(bytes([*prompt.tolist(), *generate(model, prompt, 32)]))


if __name__ == "__main__":
    main()
