"""GRPO on one-digit sums: a sampler with a KV cache, a trainer without, and the KL between their log-probabilities.

The sampler gets the weights as a server would, from `nc.serving.weights`, in this process or in one of its own. In the
batch-invariant mode both compute the same bits, and the KL is exactly 0.

Run: python examples/16_grpo.py [steps]
"""

import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

import narrowcast as nc

PLUS, EQUALS, VOCABULARY = 10, 11, 12
WIDTH, HEADS, DEPTH, LONGEST = 128, 4, 2, 16
ANSWER, GROUP = 2, 8  # tokens of an answer, answers to a question


class Model(nn.Module):
    """Tokens (batch, length) to the hidden states that the head turns into logits."""

    def __init__(self, recipe: nc.recipe.Recipe | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        options = {
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "attn_input_format": "bshd",
            "device": "cpu",
        }
        self.layers = nn.ModuleList(
            nc.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, layer_number=number, dtype=torch.bfloat16, **options)
            for number in range(1, DEPTH + 1)
        )
        self.norm = nc.LayerNorm(WIDTH, dtype=torch.bfloat16, device="cpu")
        self.head = nc.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16, device="cpu")
        angles = nc.RotaryPositionEmbedding(WIDTH // HEADS).to("cpu")(LONGEST)
        self.register_buffer("angles", angles, persistent=False)
        nc.set_recipe(self, {"": recipe, "head": None})

    def forward(self, tokens: Tensor, cache: nc.InferenceParams | None = None) -> Tensor:
        options = (
            {} if cache is None else {"inference_params": cache, "self_attn_mask_type": "padding_causal"}
        )
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, **options)
        return self.norm(x)

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """Of the answer's tokens, (batch, ANSWER): no step of a sampler, but one pass over question and answer."""
        hidden = self(tokens[:, :-1])[:, -ANSWER:]
        return -nc.linear_cross_entropy(hidden, self.head.weight, tokens[:, -ANSWER:], reduction="none")


@torch.no_grad()
def sample(model: Model, questions: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return question and answer, and the log-probabilities of the answer, token by token from a KV cache."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens, new, found = len(questions), questions, questions, []
    cache = nc.InferenceParams(rows, LONGEST, HEADS, WIDTH // HEADS, torch.bfloat16)
    for _ in range(ANSWER):
        cache.pre_step(dict.fromkeys(range(rows), new.shape[1]))
        hidden = model(new, cache)[:, -1]
        new = torch.multinomial(model.head(hidden).float().softmax(-1), 1, generator=generator)
        found.append(-nc.linear_cross_entropy(hidden, model.head.weight, new[:, 0], reduction="none"))
        tokens = torch.cat((tokens, new), 1)
    return tokens, torch.stack(found, 1)


def load(model: Model, served: dict[str, Tensor]) -> None:
    """Load what a server would be sent; codes are decoded, since this sampler quantizes its weights itself."""
    for name, parameter in model.state_dict().items():
        value, scales = served[name], served.get(f"{name}_scale_inv")
        if scales is not None:
            scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value.float() * scales[: value.shape[0], : value.shape[1]]
        parameter.copy_(value)


def serve(connection: Connection, recipe: nc.recipe.Recipe | None, mode: str | None) -> None:
    """Sample in a process of its own, until there are no more weights."""
    nc.set_deterministic(mode)
    model = Model(recipe).eval()
    while (sent := connection.recv()) is not None:
        load(model, sent[0])
        connection.send(sample(model, *sent[1:]))


def questions_of(step: int, count: int = 16) -> tuple[Tensor, Tensor]:
    """Return questions "a+b=", each GROUP times, and the two digits of their answers."""
    a, b = torch.randint(10, (2, count), generator=torch.Generator().manual_seed(step))
    asked = torch.stack((a, torch.full_like(a, PLUS), b, torch.full_like(a, EQUALS)), 1)
    right = torch.stack(((a + b) // 10, (a + b) % 10), 1)
    return asked.repeat_interleave(GROUP, 0), right.repeat_interleave(GROUP, 0)


def train(
    recipe: nc.recipe.Recipe | None = None, mode: str | None = None, processes: int = 1, steps: int = 4
) -> Iterator[tuple[float, float]]:
    """Yield the reward of each step, and the k3 estimate of the KL from the sampler to the trainer."""
    nc.set_deterministic(mode)
    torch.manual_seed(0)
    model = Model(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if processes == 2:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, recipe, mode), daemon=True).start()
    twin = Model(recipe).eval()
    for step in range(steps):
        asked, right = questions_of(step)
        in_tiles = isinstance(recipe, nc.recipe.Float8BlockScaling)
        served = dict(nc.serving.weights(model, "hf-fp8-block128" if in_tiles else "bf16"))
        if processes == 2:
            ours.send((served, asked, step))
            tokens, sampled = ours.recv()
        else:
            load(twin, served)
            tokens, sampled = sample(twin, asked, step)
        reward = (tokens[:, -ANSWER:] == right).float().mean(1).view(-1, GROUP)
        advantage = ((reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        difference = model.log_probabilities(tokens) - sampled
        loss = -(torch.exp(difference) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield reward.mean().item(), (difference.exp() - 1 - difference).mean().item()
    if processes == 2:
        ours.send(None)
    nc.set_deterministic(None)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    for name, recipe in (("bf16", None), ("FP8", nc.recipe.Float8BlockScaling())):
        for mode, processes in ((None, 1), ("batch-invariant", 1 if recipe is None else 2)):
            for reward, kl in train(recipe, mode, processes, steps):
                print(f"{name}, {mode}, {processes} processes: reward {reward:.3f}, KL {kl:.1e}")
                assert mode is None or kl == 0.0


if __name__ == "__main__":
    main()
