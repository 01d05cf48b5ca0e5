"""Quantize a tensor, look at its scales, and see what a single outlier does to each format."""

import torch

import narrowcast as nc

E4M3 = nc.DType.kFloat8E4M3
QUANTIZERS = {
    "per tensor": nc.Float8CurrentScalingQuantizer(E4M3),
    "128x128 blocks": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "MXFP8": nc.MXFP8Quantizer(E4M3),
    "NVFP4": nc.NVFP4Quantizer(),
}


def show_buffers(x: torch.Tensor) -> None:
    for name, quantizer in QUANTIZERS.items():
        q = quantizer.quantize(x)
        print(f"{name}:")
        for buffer_name in q.__tensor_flatten__()[0]:
            buffer = getattr(q, buffer_name)
            print(f"    {buffer_name:24s} {buffer.dtype!s:14s} {tuple(buffer.shape)}")


def mean_error(x: torch.Tensor, quantizer: nc.Quantizer) -> float:
    """Return the mean error of the ordinary elements beside a large one."""
    ordinary = x.abs() < 10
    return (quantizer.quantize(x).dequantize() - x)[ordinary].abs().mean().item()


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 384)
    show_buffers(x)

    spoiled = x.clone()
    spoiled[3, 5] = 1e6
    print(f"\n{'mean error':15s} {'normal':>10s} {'one outlier':>12s}")
    for name, quantizer in QUANTIZERS.items():
        print(f"{name:15s} {mean_error(x, quantizer):10.2e} {mean_error(spoiled, quantizer):12.2e}")

    q = QUANTIZERS["per tensor"].quantize(spoiled)
    # scale_inv multiplies when decoding: 448, the largest E4M3 value, becomes the outlier again.
    print(
        f"\nper tensor: scale_inv {q._scale_inv.item():.4g}, 448 * scale_inv {448 * q._scale_inv.item():.4g}"
    )


if __name__ == "__main__":
    main()
