"""``decompose``: an exported program that runs where this library is not installed."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram

from ..functional import taking_apart
from ..tensors import QuantizedTensor


def decompose(program: ExportedProgram, decomp_table: Any = None) -> ExportedProgram:
    """Return the program with this library's operators taken apart into those of PyTorch, which compute the same bits.

    These are ATen's alone: the file that ``torch.export.save`` writes is loaded and run without narrowcast. Quantized
    parameters become their codes and scales, as ``run_decompositions`` makes them.

    Args:
        program: of a model on the CPU, as ``torch.export.export`` or ``torch.export.load`` returned it; not modified.
        decomp_table: as ``program.run_decompositions`` takes it, for the operators of PyTorch.

    Raises:
        TypeError: no exported program.
        ValueError: a model on a GPU, whose operators are kernels of narrowcast, or a quantized parameter that requires
            a gradient.
        RuntimeError: an operator whose shapes are data, as those of grouped layers are.
    """
    # sympy comes with it, which whoever exports has imported
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if not isinstance(program, ExportedProgram):
        raise TypeError(f"program is a {type(program).__name__}; pass what torch.export.export returns")
    for name, value in program.state_dict.items():
        if value.is_cuda:
            raise ValueError(
                f"{name} is on {value.device}; export the model on the CPU to take its program apart"
            )
        if isinstance(value, QuantizedTensor) and value.requires_grad:
            raise ValueError(
                f"{name} is quantized and requires a gradient, and its codes cannot; call model.requires_grad_(False) "
                "before torch.export.export"
            )
    try:
        with taking_apart():
            return program.run_decompositions(decomp_table)
    except GuardOnDataDependentSymNode as error:
        raise RuntimeError(
            "the program holds an operator whose shapes are data, as those of grouped layers are, which cannot be "
            "taken apart; save it as torch.export made it, and import narrowcast where it is loaded"
        ) from error
