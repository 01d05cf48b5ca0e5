"""The forms in which an operation defines its forward and backward: checks of them, and what most of them share."""

from __future__ import annotations

from typing import Any

from .._checks import shown

PAIRS = (
    ("op_forward_compute", "op_forward_save_ctx"),
    ("fuser_forward_compute", "fuser_forward_save_ctx"),
)
SPLIT = tuple(name for pair in PAIRS for name in pair)
LEGACY = ("op_forward", "fuser_forward")


class SavesTensors:
    """The save half of operations that keep what compute returned, and nothing else."""

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)


def form_defined_by(cls: type) -> str | None:
    """Return "legacy" or "split", whichever forward this very class defines; None for neither."""
    if vars(cls).get("_framework_base", False):
        return None
    if any(name in vars(cls) for name in LEGACY):
        return "legacy"
    return "split" if any(name in vars(cls) for name in SPLIT) else None


def check_one_form(cls: type) -> None:
    """
    Raises:
        TypeError: this very class defines methods of two forms.
    """
    legacy = [name for name in LEGACY if name in vars(cls)]
    split = [name for name in SPLIT if name in vars(cls)]
    if legacy and split:
        raise TypeError(
            f"{cls.__name__} defines {' and '.join(legacy)} together with {' and '.join(split)}; a class defines its "
            "forward in one form: the compute and save_ctx pair, or the single method"
        )


def check_pairs(cls: type) -> None:
    """
    Raises:
        TypeError: this very class defines one half of a pair, and none of its bases the other.
    """
    for pair in PAIRS:
        own = [name for name in pair if name in vars(cls)]
        if len(own) != 1:
            continue
        missing = pair[1] if own[0] == pair[0] else pair[0]
        owner = next((base for base in cls.__mro__[1:] if missing in vars(base)), None)
        if owner is None or vars(owner).get("_framework_base", False):
            raise TypeError(f"{cls.__name__} defines {own[0]} but not {missing}; the two go together")


def check_no_extra_io(op: Any) -> None:
    """
    Raises:
        RuntimeError: the operation has extra inputs or outputs, which its operation-level methods do not take.
    """
    if op.num_extra_inputs or op.num_extra_outputs:
        raise RuntimeError(
            f"{type(op).__name__} has {op.num_extra_inputs} extra inputs and {op.num_extra_outputs} extra outputs, "
            "which the op_ methods do not pass on; define fuser_forward_compute, fuser_forward_save_ctx and "
            "fuser_backward"
        )


def something_returned(op: Any, returned: Any) -> RuntimeError:
    """Return the error for an ``op_forward_save_ctx`` that returns something."""
    return RuntimeError(
        f"{type(op).__name__}.op_forward_save_ctx returned {shown(returned)}; it must return None: what the "
        "backward needs goes on the context, tensors by ctx.save_for_backward"
    )
