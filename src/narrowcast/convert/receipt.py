"""``receipt``: the decisions of ``convert`` in a model, their expected gain, and later the operators that ran."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _checks
from ..nn import LayerNormLinear, LayerNormMLP
from ..recipe import Recipe, linear_plan
from .decisions import Decision, decisions_so_far, norms_so_far
from .find_modules import Found, FoundNorm, Weight, gemm_modules
from .recording import NamedWeight, RanGemms, Recorder, codes_of
from .show import as_html, as_text
from .stored import DECODED, stored_bytes

_MULTIPLES = {"tensor": 16, "1x128": 128, "128x128": 128}
"""What the sizes of a native GEMM are padded to, by how it scales; emulated GEMMs pad to the blocks of the format."""


@dataclass(frozen=True)
class GemmRecord:
    """A GEMM weight and the decision about it.

    Attributes:
        name: the module's name, and the parameter's if the module has several.
        type: class of the module.
        shape: shape of the parameter.
        decision: "converted", "kept", or "narrowcast" for a layer built from narrowcast. Code that multiplies the
            weight itself passes a converted layer by: :attr:`Receipt.idle` has what did not run.
        reason: why it was kept, or a note on a converted one.
        recipe: class of the recipe, "" without.
        parameters: number of elements.
        flops_share: share of the FLOPs per token of all these weights.
        padding: multiplications added by padding, as a share.
        stored: the weight is kept as one quantized copy.
        stored_as: "nvfp4", "mxfp4" or "mxfp8" if each pass decodes that copy; "" if it has the recipe's format.
        saved_activations: "fp8" if the layer's norm and activation keep their inputs in codes, else "".
    """

    name: str
    type: str
    shape: tuple[int, ...]
    decision: str
    reason: str
    recipe: str
    parameters: int
    flops_share: float
    padding: float
    stored: bool
    stored_as: str = ""
    saved_activations: str = ""

    @property
    def covered(self) -> bool:
        """Whether its GEMMs run under a recipe."""
        return bool(self.recipe)


@dataclass(frozen=True)
class NormRecord:
    """A norm, where norms were to be converted, and what was decided: "converted", or "kept" for the ``reason``."""

    name: str
    type: str
    decision: str
    reason: str


@dataclass(frozen=True)
class Memory:
    """Bytes before and after the conversion; only parameters include layers built from narrowcast.

    Attributes:
        parameters: bytes of the model's parameters after the conversion.
        parameters_before: the same before it; it differs if weights are stored.
        quantized_weights: copies of weights that wait for the backward after a forward of the full model.
        saved_per_token: inputs of converted layers that are saved for weight gradients.
        saved_per_token_before: the same without conversion, with a separate input per layer. Only before the conversion
            do layers that share an input share its saved copy.
    """

    parameters: int
    parameters_before: int
    quantized_weights: int
    saved_per_token: float
    saved_per_token_before: float


@dataclass(frozen=True)
class Receipt:
    """The decisions of ``convert`` and ``distributed.shard`` about a model; ``print`` shows a table.

    Attributes:
        gemms: a record per weight.
        model: class of the model.
        parameter_count: elements of the model, each counted once.
        memory: expected memory.
        dry_run: nothing was changed.
        norms: a record per norm, if norms were requested.
        sharding: the :class:`narrowcast.distributed.ShardReceipt` of a sharded model, or None.
    """

    model: str
    gemms: tuple[GemmRecord, ...]
    norms: tuple[NormRecord, ...]
    parameter_count: int
    memory: Memory
    dry_run: bool
    sharding: Any
    _model: Any = field(repr=False, compare=False)
    _recorders: list[Recorder] = field(repr=False, compare=False, default_factory=list)

    @property
    def flops_covered(self) -> float:
        """Share of the FLOPs per token in GEMMs with weights that run under a recipe; attention's own are not in it.

        After a recording, weights that did not run in it do not count.
        """
        return math.fsum(one.flops_share for one in self._running())

    @property
    def parameters_covered(self) -> float:
        """Share of the model's parameters that are weights of these GEMMs."""
        covered = sum(one.parameters for one in self._running())
        return covered / self.parameter_count if self.parameter_count else 0.0

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of the weights under a recipe of which no GEMM ran in the last recording; without one, none.

        A module around a layer that multiplies the layer's weight itself never calls it. None is named if GEMMs ran
        whose weights could not be told apart.
        """
        ran = self.ran() if self._recorders else None
        return () if ran is None or ran.inlined or any(not one.name for one in ran) else ran.idle

    def _running(self) -> list[GemmRecord]:
        idle = set(self.idle)
        return [one for one in self.gemms if one.covered and one.name not in idle]

    def assert_coverage(self, least: float) -> None:
        """Check that GEMMs with at least this share of the FLOPs per token run under a recipe.

        Args:
            least: share from 0 to 1.
        Raises:
            AssertionError: they do not; it names the largest that stay.
            TypeError: ``least`` is no number.
            ValueError: ``least`` is no share.
        """
        _checks.in_range("least", least, "use a share from 0 to 1, such as .9", below=math.nextafter(1, 2))
        if self.flops_covered >= least:
            return
        running = self._running()
        kept = sorted((one for one in self.gemms if one not in running), key=lambda one: -one.flops_share)
        named = "; ".join(
            f"{_checks.shown(one.name) if one.name else one.type} {one.flops_share:.1%} "
            f"({'did not run' if one.covered else one.reason or 'no recipe'})"
            for one in kept[:3]
        )
        raise AssertionError(
            f"{self.flops_covered:.1%} of the FLOPs of {self.model} run under a recipe, {least:.1%} are asked for; "
            f"the largest that do not: {named}"
        )

    # -- what ran ----------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[Receipt]:
        """Count the GEMMs that run inside, eager or compiled; then :meth:`ran` of this receipt returns them.

        Outside it nothing is counted, at no cost. Replays of CUDA graphs are not seen.

        Returns:
            A context manager that enters with the receipt.
        Raises:
            RuntimeError: the model was freed.
        """
        model = self._model()
        if model is None:
            raise RuntimeError(f"the {self.model} of this receipt is gone; keep it, or convert another one")
        recorder = Recorder(_weights_of(model))
        with recorder:
            yield self
        self._recorders[:] = [recorder]

    def ran(self) -> RanGemms:
        """Return the GEMMs that ran inside the last :meth:`recording`: of each layer, how often and in which precision.

        Raises:
            RuntimeError: nothing was recorded.
        """
        if not self._recorders:
            raise RuntimeError(
                "this receipt recorded nothing; run a step inside `with receipt.recording():` of the same receipt"
            )
        return self._recorders[0].result([one.name for one in self.gemms if one.covered])

    def __getattr__(self, name: str) -> Any:
        """Raise for an absent attribute; the message says where the model is."""
        if name.startswith("__") or not hasattr(nn.Module, name):
            known = [one for one in dir(self) if not one.startswith("_")]
            near = difflib.get_close_matches(name, known, 2, 0.55)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{meant}")
        raise AttributeError(
            f"this is a receipt, and {name!r} belongs to the model; narrowcast.convert works in place and returns the "
            f"model: write `model = narrowcast.convert(model, recipe)`, then `model.{name}`"
        )

    # -- showing -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        """Return the table, which an interactive session shows."""
        return str(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the text as wide as a console of ``rich``."""
        yield console.render_str(as_text(self, options.max_width), markup=False, emoji=False, highlight=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model, as plain values."""
        described = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if not one.name.startswith("_")
        }
        described.update(gemms=[dataclasses.asdict(one) for one in self.gemms])
        described.update(norms=[dataclasses.asdict(one) for one in self.norms])
        described.update(memory=dataclasses.asdict(self.memory))
        described.update(sharding=None if self.sharding is None else dataclasses.asdict(self.sharding))
        return {
            **described,
            "idle": self.idle,
            "flops_covered": self.flops_covered,
            "parameters_covered": self.parameters_covered,
        }

    def to_json(self) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self, path: str | Path) -> None:
        """Write a page with a picture of the FLOPs and the table; it needs no other file."""
        _checks.path("path", path)
        page = as_html(self)
        with _checks.writing(path):
            Path(path).write_text(page, encoding="utf-8")


def receipt(model: nn.Module) -> Receipt:
    """Return the decisions of :func:`narrowcast.convert` and ``distributed.shard`` about a model; print it.

    The receipt is made on request: after converting, loading or training, and for a model that was never converted.
    Names are relative to the model, or part of a model, that is passed.

    Args:
        model: any module.
    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"receipt: model is {_checks.a_kind(model)}; pass the torch.nn.Module that was converted"
        )
    return receipt_of(model, decisions_so_far(model), list(norms_so_far(model)), dry_run=False)


def receipt_of(
    model: nn.Module, decisions: Sequence[Decision], norms: Sequence[FoundNorm], dry_run: bool
) -> Receipt:
    """Return the receipt of these decisions, before anything is changed.

    Raises:
        ValueError: a recipe that cannot be resolved for its layer.
    """
    flops = [
        2.0 * weight.rows * weight.columns * weight.per_token
        for one in decisions
        for weight in one.found.weights
    ]
    total, records, held, after, before = math.fsum(flops) or 1.0, [], 0, 0.0, 0.0
    shares = iter(flops)
    for one in decisions:
        for weight in one.found.weights:
            records.append(_record(one, weight, next(shares) / total))
            if one.decision == "converted" and one.recipe is not None:
                weights, saved, plain = _expected_bytes(one, weight)
                held, after, before = held + weights, after + saved, before + plain
    known = [
        parameter
        for parameter in model.parameters()
        if not isinstance(parameter, nn.parameter.UninitializedParameter)
    ]
    saved_by_storing = 0
    for one in decisions:
        for weight in one.found.weights if one.stored else ():
            values, recipe = weight.tensor, one.recipe
            assert recipe is not None
            how = values.dtype, one.stored, one.module_type
            saved_by_storing += values.numel() * values.element_size()
            saved_by_storing -= stored_bytes(recipe, one.role_name, _matrices(weight), *how)
    size = sum(parameter.numel() * parameter.element_size() for parameter in known)
    return Receipt(
        type(model).__name__,
        tuple(records),
        tuple(
            NormRecord(one.name, type(one.module).__name__, "converted" if one.layer else "kept", one.reason)
            for one in norms
        ),
        sum(parameter.numel() for parameter in known),
        Memory(size - saved_by_storing, size, held, after, before),
        dry_run,
        getattr(model, "_shard_receipt", None),
        weakref.ref(model),
    )


def _matrices(weight: Weight) -> tuple[int, ...]:
    """Return (N, K) of a weight, or (G, N, K)."""
    size = weight.rows, weight.columns
    return (weight.groups, *size) if weight.tensor.dim() == 3 else size


def weight_name(found: Found, weight: Weight) -> str:
    """Return the name of a weight in the receipt: its module's name, followed by its own if the module has several
    weights.
    """
    return f"{found.name}.{weight.name}".lstrip(".") if len(found.weights) > 1 else found.name


def _record(one: Decision, weight: Weight, share: float) -> GemmRecord:
    lazy = isinstance(weight.tensor, nn.parameter.UninitializedParameter)
    return GemmRecord(
        weight_name(one.found, weight),
        type(one.found.module).__name__,
        () if lazy else tuple(weight.tensor.shape),
        one.decision,
        one.reason or ("no recipe: its own is None" if one.recipe is None else ""),
        "" if one.recipe is None else type(one.recipe).__name__,
        0 if lazy else weight.tensor.numel(),
        share,
        0.0 if one.recipe is None else _padding(one.recipe, one, weight),
        bool(one.stored),
        one.stored if one.stored in DECODED else "",
        _saved_activations(one),
    )


def _saved_activations(one: Decision) -> str:
    """Return in what format a layer keeps the inputs of its norm and activation; "" if in theirs, or without any."""
    has_norm = isinstance(one.found.module, (LayerNormLinear, LayerNormMLP))
    return (one.recipe.saved_activations or "") if has_norm and one.recipe is not None else ""


def _padding(recipe: Recipe, one: Decision, weight: Weight) -> float:
    layout = linear_plan(
        recipe, one.role_name, True, True, module_type=one.module_type
    ).weight.quantizer._format_layout()
    multiple = _MULTIPLES.get(layout.native, max(layout.scale_group))
    if not multiple or not weight.rows * weight.columns:
        return 0.0
    rows, columns = (math.ceil(size / multiple) * multiple for size in (weight.rows, weight.columns))
    return rows * columns / (weight.rows * weight.columns) - 1.0


_TOKENS = 4096  # averages the saved bytes per token, so that block scales count


def _expected_bytes(one: Decision, weight: Weight) -> tuple[int, float, float]:
    """Return the quantized weights held for the backward, the saved per token, and the saved per token without
    conversion, in bytes.
    """
    recipe: Any = one.recipe
    trains = weight.tensor.requires_grad
    elements = weight.rows * weight.columns if weight.groups == 1 else None
    plan = linear_plan(
        recipe, one.role_name, True, trains, module_type=one.module_type, weight_elements=elements
    )
    dtype, size = weight.tensor.dtype, weight.tensor.element_size()
    plain = size * weight.columns * weight.per_token if trains else 0.0
    if plan.backward_override == "high_precision":
        return 0, plain, plain
    columnwise = plan.backward_override is None
    held = 0
    if not one.stored and plan.dgrad_weight is None:
        held = _bytes(plan.weight, (weight.rows, weight.columns), dtype, columnwise)
    saved = _bytes(plan.input, (_TOKENS, weight.columns), dtype, columnwise)
    return held * weight.groups, saved / _TOKENS * weight.per_token if trains else 0.0, plain


def _bytes(operand: Any, shape: tuple[int, int], dtype: torch.dtype, columnwise: bool) -> int:
    """Return bytes of one direction of a quantized operand."""
    buffers = operand.quantizer._describe_buffers(shape, dtype).values()
    read = operand.columnwise if columnwise else operand.rowwise
    return sum(math.prod(sizes) * kind.itemsize for (sizes, kind), used in zip(buffers, read) if used)


def _weights_of(model: nn.Module) -> list[NamedWeight]:
    """Return where the weights of a model are found, with the names that receipts have for them."""
    return [
        NamedWeight(weight_name(found, weight), found.module, weight.name, codes_of(weight.tensor).numel())
        for found in gemm_modules(model)
        for weight in found.weights
        if not isinstance(weight.tensor, nn.parameter.UninitializedParameter)
    ]
