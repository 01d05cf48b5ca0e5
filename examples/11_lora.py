"""LoRA of PEFT on a converted model: the frozen weights are stored in FP8, and have no weight gradients.

Run: pip install '.[peft]'; python examples/11_lora.py
"""

from collections import Counter

import peft
import torch
import transformers

import narrowcast as nc


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).requires_grad_(False)
    nc.convert(base, nc.recipe.Float8CurrentScaling(), weights="stored")
    receipt = nc.receipt(base)
    before, after = receipt.memory.parameters_before, receipt.memory.parameters
    print(f"parameters: {before:,} bytes before, {after:,} with stored weights")
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear"))
    model.print_trainable_parameters()

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    words = torch.randint(128, (4, 32), device=device)
    for step in range(4):
        with receipt.recording():
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")
    print("GEMMs of the frozen weights:", dict(Counter(one.gemm for one in receipt.ran())))

    model.eval()
    with torch.no_grad():
        low = model(words).logits.float()
        nc.revert(model)  # in high precision, so that merging does not round
        merged = model.merge_and_unload()
        change = (merged(words).logits - low).norm() / low.norm()
    print(f"in high precision and merged, the outputs differ by {change.item():.3f}")


if __name__ == "__main__":
    main()
