"""A Mixtral of Transformers, converted: router and experts, two steps with accelerate, and the same files when saved.

Run: pip install '.[hf]'; python examples/10_hugging_face.py
"""

import tempfile
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator

import narrowcast as nc

# A GPU without the format's tensor cores needs emulate=True; a CPU always emulates.
RECIPE = nc.recipe.MXFP8BlockScaling(emulate=torch.cuda.is_available())


def main() -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = transformers.MixtralForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/plain")
        nc.convert(model, RECIPE)
        receipt = nc.receipt(model)
        model.save_pretrained(f"{folder}/converted")
        plain, converted = (Path(folder, name, "model.safetensors") for name in ("plain", "converted"))
        print("the same file:", plain.read_bytes() == converted.read_bytes())
    print(receipt)

    accelerator = Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    words = torch.randint(128, (4, 32), device=accelerator.device)
    for step in range(2):
        with receipt.recording():
            loss = model(input_ids=words, labels=words).loss
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")
    print(f"{sum(one.calls for one in receipt.ran())} low-precision GEMMs in the last step")


if __name__ == "__main__":
    main()
