"""``watch``: per layer and operand, how much quantizing loses, sampled every so many steps.

Two hooks stand on every watched layer. In a step that is not sampled they do nothing, and a compiled graph holds
nothing of them; in a sampled one the input, and the gradient of the output, pass through an operator that copies them
and writes a row of statistics. Compiled code therefore exists twice, chosen by a guard on one flag; neither changes a
number of the training.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _checks
from .._checks import shown, some
from .._table import as_table
from ..autograd import DelayedScales
from ..functional import OBSERVED, observe, observe_groups
from ..layers import GroupedLinearLayer, LinearLayer, Stage
from ..layers.patterns import Selectors, selected_names
from ..moe import HEALTH, router_health
from ..nn import MoERouter
from ..nn.norm_linear import NormLinearLayer
from ..ops import BasicOperation
from ..quantizers import IdentityQuantizer, Quantizer
from ..recipe import LinearPlan, Recipe, linear_plan
from ..tensors import GroupedTensor, QuantizedTensor
from ..upstream.modules import drop_buffer, own_buffers
from .router_record import RouterRecord, table_of

# buffers of a watched layer, one per hook: as parts of one they would not be what compiled code writes to
_INPUT, _GRADIENT, _HEALTH = "_watched_input", "_watched_gradient", "_watched_health"
_NOTHING = "nothing was sampled: no step was counted; call watch.step() once per step of the training"


@dataclass(frozen=True)
class Record:
    """One operand of one layer in one step.

    Attributes:
        amax: the largest magnitude.
        underflow: share of the non-zero elements that quantize to 0.
        saturation: share of all elements that exceed their block's largest code.
        sqnr: signal to quantization noise, in dB; inf if nothing is lost.
    """

    step: int
    layer: str
    operand: str
    amax: float
    underflow: float
    saturation: float
    sqnr: float


class _Observed(torch.autograd.Function):
    """A tensor passed on, while what is ``seen`` of it is observed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seen: Tensor,
        splits: Tensor | None,
        quantizer: Quantizer,
        scale: Tensor | None,
        into: Tensor,
    ) -> Tensor:
        return _observe(seen, splits, quantizer, scale, into, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None, None, None, None, None


class _ObservedGradient(torch.autograd.Function):
    """A tensor whose gradient is observed on its way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, splits: Tensor | None, quantizer: Quantizer, scale: Tensor | None, into: Tensor
    ) -> Tensor:
        ctx.quantizer = quantizer
        ctx.save_for_backward(into, scale, splits)
        return x.clone()  # nothing may write to a view that a function returns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        into, scale, splits = ctx.saved_tensors
        return _observe(grad, splits, ctx.quantizer, scale, into, grad), None, None, None, None


def _observe(
    seen: Tensor,
    splits: Tensor | None,
    quantizer: Quantizer,
    scale: Tensor | None,
    into: Tensor,
    through: Tensor,
) -> Tensor:
    if splits is None:
        return observe(seen, quantizer, scale, into, through)
    return observe_groups(seen, splits, quantizer, scale, into, through)


class _OperationObserver(NamedTuple):
    """What observes the operands of a linear operation in one call of its list; None for those in high precision."""

    input: Quantizer | None
    grad_output: Quantizer | None
    into_input: Tensor
    into_gradient: Tensor

    def observe_input(self, x: Tensor, scales: DelayedScales | None) -> Tensor:
        """Pass on the input of the operation."""
        if self.input is None or not isinstance(x, Tensor) or isinstance(x, QuantizedTensor):
            return x
        scale = None if scales is None else scales.scale
        return observe(x.detach(), self.input, scale, self.into_input, x)

    def observe_gradient(self, grad: Tensor, scales: DelayedScales | None) -> Tensor:
        """Pass on the gradient of its output."""
        if self.grad_output is None or not isinstance(grad, Tensor) or isinstance(grad, QuantizedTensor):
            return grad
        scale = None if scales is None else scales.scale
        return observe(grad, self.grad_output, scale, self.into_gradient, grad)


class _Hooks:
    """The hooks on the layers. Compiled code guards on ``sampling``."""

    def __init__(self) -> None:
        self.sampling = False

    def before(self, layer: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Observe what the first GEMM reads."""
        if not self.sampling or not isinstance(layer, LinearLayer):  # revert has made it what it was
            return None
        x = inputs[0]
        seen, residual = x.detach(), named.get("residual")
        if residual is not None:
            seen = seen + residual.detach()
        if isinstance(layer, NormLinearLayer):
            seen = layer._normalize(seen)
        # the stages stand in the order of a backward
        x = self.observe_input(layer, layer._stages[-1], x, seen, _splits(layer, inputs, named))
        return (x, *inputs[1:]), named

    def after(self, layer: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        """Have the gradient of the output observed, which the last GEMMs' backward reads."""
        if not self.sampling or not isinstance(layer, LinearLayer):
            return None
        out = output[0] if isinstance(output, tuple) else output
        out = self.observe_gradient(layer, layer._stages[0], out, _splits(layer, inputs, named))
        return (out, *output[1:]) if isinstance(output, tuple) else out

    def observe_load(self, layer: Any, tokens_per_expert: Tensor) -> None:
        """Observe how many rows each of a layer's experts has."""
        if self.sampling:
            getattr(layer, _HEALTH).copy_(router_health(tokens_per_expert))

    def observer(self, operation: Any) -> _OperationObserver:
        """Return what observes an operation in this call of its list, under the recipe of the call."""
        (stage,), recipe = operation._stages, operation._recipe_in_force()
        return _OperationObserver(
            _quantizer(operation, recipe, stage, "input"),
            _quantizer(operation, recipe, stage, "grad_output"),
            getattr(operation, _INPUT),
            getattr(operation, _GRADIENT),
        )

    def observe_input(
        self, layer: Any, stage: Stage, x: Tensor, seen: Tensor, splits: Tensor | None = None
    ) -> Tensor:
        """Pass on the input of a stage; ``seen`` of it is observed, by groups where there are ``splits``."""
        recipe = layer._recipe_in_force()
        quantizer = _quantizer(layer, recipe, stage, "input")
        if not self.sampling or quantizer is None or isinstance(x, QuantizedTensor):
            return x
        scale = _scale(layer, recipe, stage)
        return _Observed.apply(x, seen, splits, quantizer, scale, getattr(layer, _INPUT))

    def observe_gradient(self, layer: Any, stage: Stage, out: Tensor, splits: Tensor | None = None) -> Tensor:
        """Pass on the output of a stage, whose gradient is observed."""
        recipe = layer._recipe_in_force()
        quantizer = _quantizer(layer, recipe, stage, "grad_output")
        unseen = not out.requires_grad or isinstance(out, QuantizedTensor)
        if not self.sampling or unseen or quantizer is None:
            return out
        scale = _scale(layer, recipe, stage)
        return _ObservedGradient.apply(out, splits, quantizer, scale, getattr(layer, _GRADIENT))


def _splits(layer: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """Return the rows of each group that a grouped layer was called with; None for other layers."""
    if not isinstance(layer, GroupedLinearLayer):
        return None
    x, *rest = inputs
    given = rest[0] if rest else named["m_splits"]
    return layer._checked_splits(given, x.reshape(-1, layer.in_features))[0]


def _plan(layer: Any, recipe: Recipe | None, stage: Stage) -> LinearPlan:
    """Return the plan of a stage with both gradients."""
    joins = layer._parallel is not None
    return linear_plan(recipe, stage.name, True, True, module_type=layer._module_type, joins=joins)


def _quantizer(layer: Any, recipe: Recipe | None, stage: Stage, operand: str) -> Quantizer | None:
    """Return the row-wise quantizer of an operand of a stage; None for high precision."""
    plan = _plan(layer, recipe, stage)
    if not plan.quantized:
        return None
    quantizer: Any = getattr(plan, operand).quantizer._half(columnwise=False)
    if isinstance(quantizer, IdentityQuantizer):
        return None
    return quantizer.with_usage(rowwise=True, columnwise=False)


def _scale(layer: Any, recipe: Recipe | None, stage: Stage) -> Tensor | None:
    """Return the scales that the casts of a stage read; None without delayed scaling."""
    plans = {one.prefix: _plan(layer, recipe, one) for one in layer._stages}
    if plans[stage.prefix].delayed is None:
        return None
    # Under an autocast its first forward would. A trace reads once which rules the layer has: those of all stages.
    layer._keep_states(tuple(plans), tuple(plans.values()))
    return getattr(layer, f"{stage.prefix}scale")  # type: ignore[no-any-return]


class Watch:
    """The records of a watched model; see :func:`watch`. Leaving it as a context manager closes it."""

    def __init__(
        self, layers: dict[str, Any], routers: dict[str, MoERouter], every: int, skipped: tuple[str, ...]
    ) -> None:
        self.every, self.skipped = every, skipped
        self.records: list[Record] = []
        self.routers: list[RouterRecord] = []
        self._layers, self._step, self._hooks = layers, 0, _Hooks()
        self._routers: dict[str, Any] = routers | {
            name: layer for name, layer in layers.items() if hasattr(layer, "_routed")
        }
        self._handles: list[Any] = []
        for layer in layers.values():
            device = next(layer.parameters()).device
            for name in (_INPUT, _GRADIENT):
                layer.register_buffer(
                    name,
                    torch.full((len(OBSERVED),), math.nan, dtype=torch.float32, device=device),
                    persistent=False,
                )
            if hasattr(layer, "_watcher"):  # what its GEMMs read is not what it is called with
                layer._watcher = self._hooks
                continue
            self._handles.append(layer.register_forward_pre_hook(self._hooks.before, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._hooks.after, with_kwargs=True))
        for router in self._routers.values():
            device = next(router.parameters()).device
            unseen = torch.full((len(HEALTH),), math.nan, dtype=torch.float32, device=device)
            router.register_buffer(_HEALTH, unseen, persistent=False)
            router._watcher = self._hooks
        self._hooks.sampling = True
        torch.compiler.reset()  # graphs are not guarded on hooks: those of before would go on without them

    @torch.no_grad()
    def step(self) -> list[Record]:
        """Count a step, and return its records if it was sampled. Call it once per step, after the optimizer or before.

        Raises:
            RuntimeError: it was to be sampled, and no watched layer ran its hooks, or none is left.
        """
        new: list[Record] = []
        if self._hooks.sampling:
            layers = {name: one for name, one in self._layers.items() if isinstance(one, LinearLayer)}
            if not layers:
                raise RuntimeError(
                    "no watched layer is left: the watch was closed, or the model reverted; call narrowcast.convert "
                    "and narrowcast.watch again"
                )
            rows = [row for name, layer in layers.items() for row in self._rows_of(name, layer)]
            device = rows[0][2].device
            table = torch.stack([row.to(device) for _, _, row in rows]).tolist()  # the host waits once
            new = [
                self._record(name, operand, row)
                for (name, operand, _), row in zip(rows, table, strict=True)
                if row[0] == row[0]
            ]
            if not any("weight" not in one.operand for one in new):
                raise RuntimeError(
                    "no watched layer was seen in a step that was to be sampled; run the model, under a recipe, "
                    "between watch and step()"
                )
            self.records += new
            self.routers += self._health()
        self._step += 1
        self._hooks.sampling = self._step % self.every == 0
        return new

    def _health(self) -> list[RouterRecord]:
        """Return the health of the routers that ran, and forget it."""
        rows = [getattr(router, _HEALTH) for router in self._routers.values()]
        if not rows:
            return []
        table = torch.stack([row.to(rows[0].device) for row in rows]).tolist()
        for row in rows:
            row.fill_(math.nan)
        named = zip(self._routers, table, strict=True)
        return [RouterRecord(self._step, name, *row) for name, row in named if row[0] == row[0]]

    def _rows_of(self, name: str, layer: Any) -> list[tuple[str, str, Tensor]]:
        """Return layer, operand and statistics of the hooks' records and of the current weights."""
        stages = layer._stages if hasattr(layer, "_watcher") else layer._stages[::-1]  # in a forward's order
        first, last, rows = stages[0], stages[-1], []
        for operand, buffer in ((f"{first.prefix}input", _INPUT), (f"{last.prefix}grad_output", _GRADIENT)):
            row = getattr(layer, buffer)
            rows.append((name, operand, row.clone()))
            row.fill_(math.nan)
        for stage in stages:
            quantizer = _quantizer(layer, layer._last_recipe, stage, "weight")
            weights, splits = layer._matrices(stage), None
            if quantizer is not None and not isinstance(weights[0], (GroupedTensor, QuantizedTensor)):
                into = torch.empty_like(getattr(layer, _INPUT))
                scale = getattr(layer, f"{stage.prefix}scale")
                local = [w.to_local() if hasattr(w, "to_local") else w for w in weights]
                weight = torch.cat([w.detach().reshape(-1, w.shape[-1]) for w in local])
                if layer._module_type == "grouped_linear":
                    splits = torch.full((layer._groups,), weight.shape[0] // layer._groups, dtype=torch.int64)
                _observe(weight, splits, quantizer, scale, into, into)
                rows.append((name, stage.weight, into))
        return rows

    def _record(self, layer: str, operand: str, row: list[float]) -> Record:
        elements, nonzero, amax, squares, error, underflows, saturations = row
        sqnr = (
            10 * math.log10(squares / error)
            if squares > 0 and error > 0
            else math.inf
            if not error
            else math.nan
        )
        return Record(
            self._step,
            layer,
            operand,
            amax,
            underflows / max(nonzero, 1),
            saturations / max(elements, 1),
            sqnr,
        )

    def latest(self) -> list[Record]:
        """Return the records of the last sampled step."""
        return [one for one in self.records if one.step == self.records[-1].step]

    def __str__(self) -> str:
        rows = []
        for one in self.latest():
            shares = (f"{one.amax:.4g}", f"{one.underflow:.3%}", f"{one.saturation:.3%}", f"{one.sqnr:.1f}")
            rows.append((str(one.step), one.layer, one.operand, *shares))
        if not self.records:
            return _NOTHING
        head = tuple(field.name.replace("sqnr", "sqnr, dB") for field in fields(Record))
        lines = as_table(head, rows, frozenset((0, 3, 4, 5, 6)), name=1)
        seen = {one.layer for one in self.records if not one.operand.endswith("weight")}  # read in any case
        idle = [
            name for name, one in self._layers.items() if name not in seen and getattr(one, "recipe", None)
        ]
        if idle:
            lines.append(f"under a recipe, but not called in a sampled step: {some(idle)}")
        routers = [one for one in self.routers if one.step == self.records[-1].step]
        lines += ["", *table_of(routers)] if routers else []
        samples = len({one.step for one in self.records})
        if samples > 1:
            lines.append(f"last of {samples} samples; all are in watch.records")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the table, which an interactive session shows."""
        return str(self)

    def to_csv(self, path: str | Path) -> None:
        """Write all records, one a line under the names of :class:`Record`.

        Raises:
            ValueError: nothing was sampled yet.
        """
        _checks.path("path", path)
        self._check_sampled()
        with _checks.writing(path), open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Record)])
            writer.writerows(tuple(vars(one).values()) for one in self.records)

    def to_tensorboard(self, writer: Any) -> None:
        """Add all records as scalars: ``quantization/<statistic>/<layer>.<operand>``, ``router/<statistic>/<router>``.

        Args:
            writer: a ``SummaryWriter``, or whatever has its ``add_scalar(tag, value, step)``.
        Raises:
            TypeError: ``writer`` has none.
            ValueError: nothing was sampled yet.
        """
        if not hasattr(writer, "add_scalar"):
            raise TypeError(
                f"writer is {_checks.typed(writer)}; pass a torch.utils.tensorboard.SummaryWriter(log_dir)"
            )
        self._check_sampled()
        for one in self.records:
            for statistic in ("amax", "underflow", "saturation", "sqnr"):
                tag = f"quantization/{statistic}/{one.layer}.{one.operand}"
                writer.add_scalar(tag, getattr(one, statistic), one.step)
        for router in self.routers:
            for statistic in HEALTH:
                value = getattr(router, statistic)
                if value == value:
                    writer.add_scalar(f"router/{statistic}/{router.router}", value, router.step)

    def plot(self, path: str | Path) -> None:
        """Draw SQNR and underflow over the steps, a line per layer and operand, and write the picture.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: nothing was sampled yet, or the name ends in no format of matplotlib.
        """
        _checks.path("path", path)
        self._check_sampled()
        from .picture import draw

        with _checks.writing(path):
            draw(self.records, self._recipes(), path)

    def _recipes(self) -> list[str]:
        """Return the names of the recipes under which the watched layers ran last."""
        found = (getattr(layer, "_last_recipe", None) for layer in self._layers.values())
        return sorted({type(one).__name__ for one in found if one is not None})

    def _check_sampled(self) -> None:
        if not self.records:
            raise ValueError(_NOTHING)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks and buffers from the model; the records stay."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers.values():
            vars(layer).pop("_watcher", None)
            for name in (_INPUT, _GRADIENT):
                drop_buffer(layer, name)
        for router in self._routers.values():
            vars(router).pop("_watcher", None)
            drop_buffer(router, _HEALTH)
        self._layers, self._routers, self._handles = {}, {}, []


def watch(model: nn.Module, *, every: int = 100, only: Selectors = None) -> Watch:
    """Sample the quantization of a model's operands: amax, underflow, saturation and SQNR.

    The first step is sampled, then one of every ``every``. Call ``step()`` once per step. Sampled are the input of a
    layer's first GEMM, every weight, and the gradient of its output, but not the tensors between the two GEMMs of a
    ``LayerNormMLP`` or of converted experts. A grouped layer has one record per operand, of all groups together, each
    with its own scale. Grouped operations of ``ops`` are skipped. The load of every ``MoERouter`` and of converted
    experts is sampled into ``routers``. Numbers do not change. A sampled step takes a few fp32 copies of its largest
    operand. Code that ``torch.compile`` has compiled is compiled again.

    Args:
        every: steps from one sample to the next.
        only: as in :func:`narrowcast.convert`.
    Raises:
        ValueError: ``every`` < 1, a pattern has no match, there is no layer to watch, or a layer is watched already.
    """
    _checks.module("model", model)
    _checks.positive(every=every)
    found = {name: module for name, module in model.named_modules() if isinstance(module, LinearLayer)}
    if only is not None and found:
        every_layer = len(found)
        found = {
            name: found[name] for name in selected_names(only, found, model, "layer of narrowcast", "only")
        }
        if not found:
            raise ValueError(f"only={shown(only)} chooses none of the {every_layer} layers of narrowcast")
    # of grouped operations the splits are among the tensors of a list
    skipped = tuple(
        name
        for name, module in found.items()
        if isinstance(module, GroupedLinearLayer) and isinstance(module, BasicOperation)
    )
    layers = {name: module for name, module in found.items() if name not in skipped}
    if not layers:
        raise ValueError("the model has no layer of narrowcast to watch; call narrowcast.convert first")
    for name, layer in layers.items():
        if _INPUT in own_buffers(layer):
            raise ValueError(
                f"{shown(name)} is watched already; close() the other watch, or use it in `with nc.watch(...) as "
                "watch:`"
            )
    routers = {name: module for name, module in model.named_modules() if isinstance(module, MoERouter)}
    return Watch(layers, routers, every, skipped)
