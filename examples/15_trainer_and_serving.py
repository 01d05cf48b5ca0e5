"""A Llama of Transformers, converted, trained by the Trainer, exported in FP8 and loaded back by Transformers.

Run: pip install '.[hf,serving]'; python examples/15_trainer_and_serving.py
"""

import tempfile
from pathlib import Path

import torch
import transformers

import narrowcast as nc


class Words(torch.utils.data.Dataset):
    """Sequences that count up in steps of one to eight."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(32) * (1 + index % 8) % 128
        return {"input_ids": words, "labels": words}


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    nc.convert(model, nc.recipe.Float8BlockScaling())
    receipt = nc.receipt(model)
    receipt.assert_coverage(0.85)
    folder = Path(tempfile.mkdtemp())
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_steps=16,
        logging_steps=8,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    transformers.Trainer(model, arguments, train_dataset=Words()).train()

    print(nc.export(model, folder / "served", format="hf-fp8-block128"))
    served = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "served",
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),  # no kernels of a server here
    )
    words = Words()[2]["input_ids"][None]
    with torch.no_grad():
        ours, theirs = (one.eval().cpu()(words).logits.float() for one in (model, served))
    print(f"loaded back, the logits differ by {((ours - theirs).norm() / ours.norm()).item():.3f}")
    print("both say:", theirs.argmax(-1)[0, 8:14].tolist(), ours.argmax(-1)[0, 8:14].tolist())


if __name__ == "__main__":
    main()
