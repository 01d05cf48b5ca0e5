"""Parameters created quantized: no high-precision copy in the model, a master copy in the optimizer."""

import torch

import narrowcast as nc

RECIPE = nc.recipe.MXFP8BlockScaling(emulate=True)


def held_bytes(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, nc.QuantizedTensor):
        return tensor.numel() * tensor.element_size()
    buffers = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def main() -> None:
    torch.manual_seed(0)
    plain = nc.Linear(256, 256, bias=False, device="cpu")
    with nc.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=True):
        layer = nc.Linear(256, 256, bias=False, device="cpu")
    print(f"weight: {type(layer.weight).__name__}, nominal dtype {layer.weight.dtype}")
    print(f"bytes, both directions: {held_bytes(layer.weight)}, fp32: {held_bytes(plain.weight)}")

    # The optimizer works on fp32 masters, which start from the values before quantization.
    master = layer.weight.get_high_precision_init_val().clone()
    layer.weight.clear_high_precision_init_val()
    optimizer = torch.optim.SGD([master], lr=0.5)

    x = torch.randn(64, 256)
    target = torch.roll(x, 1, dims=-1)
    for step in range(5):
        with nc.autocast(recipe=RECIPE):
            loss = torch.nn.functional.mse_loss(layer(x), target)
        loss.backward()
        master.grad, layer.weight.grad = layer.weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            layer.weight.copy_(master)  # quantizes
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
