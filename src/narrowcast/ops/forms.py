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
PACKED_FORWARD = ("pack_forward_args", "forward_compute", "forward_setup_context")
PACKED_BACKWARD = ("pack_backward_args", "backward_compute")
BACKWARD = ("op_backward", "fuser_backward")


class SavesTensors:
    """The save half of operations that keep what compute returned, and nothing else."""

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)


def form_defined_by(cls: type) -> str | None:
    """ "packed", "legacy" or "split", whichever forward this very class defines; None for neither.

    Transformer Engine's operations define both the packed form and the legacy one, which then do the same.
    """
    if vars(cls).get("_framework_base", False):
        return None
    if any(name in vars(cls) for name in PACKED_FORWARD):
        return "packed"
    if any(name in vars(cls) for name in LEGACY):
        return "legacy"
    return "split" if any(name in vars(cls) for name in SPLIT) else None


def packs_backward(cls: type) -> bool:
    """Return whether the backward that a class defines last is that of the packed form."""
    for base in cls.__mro__:
        if vars(base).get("_framework_base", False):
            continue
        if any(name in vars(base) for name in PACKED_BACKWARD):
            return True
        if any(name in vars(base) for name in BACKWARD):
            return False
    return False


def check_one_form(cls: type) -> None:
    """
    Raises:
        TypeError: this very class defines methods of two forms.
    """
    own = [name for name in (*LEGACY, *PACKED_FORWARD) if name in vars(cls)]
    split = [name for name in SPLIT if name in vars(cls)]
    if own and split:
        raise TypeError(
            f"{cls.__name__} defines {' and '.join(own)} together with {' and '.join(split)}; a class defines its "
            "forward in one form: the compute and save_ctx pair, the single method, or pack_forward_args, "
            "forward_compute and forward_setup_context"
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


def check_packed(cls: type) -> None:
    """
    Raises:
        TypeError: this very class defines part of the packed form, and none of its bases the rest.
    """
    for group in (PACKED_FORWARD, PACKED_BACKWARD):
        own = [name for name in group if name in vars(cls)]
        missing = [name for name in group if not hasattr(cls, name)]
        if own and missing:
            raise TypeError(
                f"{cls.__name__} defines {' and '.join(own)} but not {' and '.join(missing)}; they go together"
            )


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
