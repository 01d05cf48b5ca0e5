"""Options that Transformer Engine's layers have and these do not: accepted at the values that change nothing.

A script written for Transformer Engine passes them all, most of the time to say that it does not want them. Each is
declared once, with the accepted values as its type: type checkers refuse others, and so does a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args, get_type_hints

from .._checks import shown


class NormOptions(TypedDict, total=False):
    """Further options of norms."""

    sm_margin: Literal[0]


class OverlapOptions(TypedDict, total=False):
    """Further options of layers with GEMMs."""

    symmetric_ar_type: Literal[None]
    ub_overlap_ag: Literal[False]
    ub_overlap_rs: Literal[False]
    ub_overlap_rs_dgrad: Literal[False]
    ub_bulk_dgrad: Literal[False]
    ub_bulk_wgrad: Literal[False]
    ub_name: Any


class GroupedOptions(OverlapOptions, total=False):
    """Further options of grouped layers: which of Transformer Engine's two implementations runs."""

    use_grouped_tensor: Any


class MLPOptions(OverlapOptions, total=False):
    """Further options of feed-forward blocks: sizes for the warm-up of Transformer Engine's kernels."""

    parallel_mode: Literal[None, "column", "row"]
    seq_length: Any
    micro_batch_size: Any


class AttentionOptions(TypedDict, total=False):
    """Further options of attention blocks."""

    ub_overlap_ag: Literal[False]
    ub_overlap_rs: Literal[False]
    ub_overlap_rs_dgrad: Literal[False]
    ub_bulk_dgrad: Literal[False]
    ub_bulk_wgrad: Literal[False]
    seq_length: Any
    micro_batch_size: Any


class TransformerOptions(TypedDict, total=False):
    """Further options of Transformer layers: kinds of overlap among those of ``ub_tp_comm_overlap``."""

    ub_tp_comm_overlap: Literal[False]
    ub_overlap_ag: Any
    ub_overlap_rs: Any
    ub_overlap_rs_dgrad: Any
    ub_bulk_dgrad: Any
    ub_bulk_wgrad: Any
    micro_batch_size: Any


def check_neutral(layer: str, options: Mapping[str, Any], declared: type) -> None:
    """Check what a constructor was given besides its own options.

    Args:
        layer: name of the class.
        options: by name.
        declared: one of the classes above.

    Raises:
        NotImplementedError: a value requests something that is not supported.
    """
    if not options:
        return
    hints = get_type_hints(declared)
    for name, value in options.items():
        accepted = get_args(hints[name])
        if accepted and not any(value is own or (own is not None and value == own) for own in accepted):
            raise NotImplementedError(
                f"{layer}({name}={shown(value)}) is not supported by this layer; leave {name} out, or pass "
                f"{' or '.join(map(repr, accepted))}"
            )
