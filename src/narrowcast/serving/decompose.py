"""``decompose``: an exported program that runs where this library is not installed."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram

from .._checks import a_kind, typed
from ..functional import taking_apart
from ..tensors import QuantizedTensor


def decompose(program: ExportedProgram, decomp_table: Any = None) -> ExportedProgram:
    """Decompose the program's narrowcast operators into PyTorch's, with the same bits.

    The result has only ATen's operators: a process without narrowcast loads and runs the file of ``torch.export.save``.
    Quantized parameters become their codes and scales, as in ``run_decompositions``.

    Args:
        program: an exported program of a model on the CPU, from ``torch.export.export`` or ``torch.export.load``; not
            modified.
        decomp_table: for PyTorch's operators, as in ``program.run_decompositions``.

    Raises:
        TypeError: ``program`` is not an exported program.
        ValueError: the model is on a GPU, whose operators are narrowcast's kernels, or a quantized parameter requires a
            gradient.
        RuntimeError: an operator's shapes are data, as in grouped layers.
    """
    # it imports sympy, which an export has already imported
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if not isinstance(program, ExportedProgram):
        raise TypeError(f"program is {a_kind(program)}; pass what torch.export.export returns")
    if decomp_table is not None and not isinstance(decomp_table, dict):
        raise TypeError(
            f"decomp_table is {typed(decomp_table)}; pass a dict from operators to functions, or None"
        )
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
