"""``ParallelStyle``s for ``parallelize_module``: PyTorch's own by name, whose layers compute on plain local tensors.

Parameters become DTensors, so that checkpoints, clipping, optimizers and FSDP2 know them; the layer takes its part of
each and runs as one that was made with ``tp_group``. Other modules go to PyTorch's style.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import style

from .._checks import a_kind
from ..layers import LinearLayer
from ..layers.described import how_stored
from ..layers.norm import NormParameters
from ..layers.tensor_parallel import parallel_of
from ..nn import LayerNormLinear, Linear
from ..upstream.modules import own_parameters

_COLUMNS = Shard(-1)


class ColwiseParallel(style.ColwiseParallel):
    """Column-parallel ``Linear`` or ``LayerNormLinear``; arguments as in PyTorch's class.

    Args:
        input_layouts: Replicate (default), or Shard of a dim that is not the last: the layer then gathers the rows of
            all ranks itself, quantized.
        output_layouts: Shard(-1) by default.
        use_local_output: return a plain tensor, else a DTensor.

    Errors are raised when the style is applied.

    Raises:
        ValueError: features do not divide among the ranks, the input has another layout, or the layer is already split,
            has ``parameters_split``, ``fuse_wgrad_accumulation``, ``delay_wgrad_compute``, quantized parameters or
            several outputs.
        NotImplementedError: another layer of this library.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LinearLayer):
            return super()._apply(module, device_mesh)
        (layout,) = self.input_layouts
        rows = _rows_dim(layout, "input_layouts")
        _place(module, device_mesh, "column", rows is not None, getattr(self, "src_data_rank", 0))
        wanted = self.input_layouts
        return _hooked(
            module, device_mesh, wanted, wanted, (_COLUMNS,), self.output_layouts, rows, self.use_local_output
        )


class RowwiseParallel(style.RowwiseParallel):
    """Row-parallel ``Linear``; arguments as in PyTorch's class.

    Args:
        input_layouts: Shard(-1) by default.
        output_layouts: Replicate (default) sums the outputs; Shard of a dim that is not the last sums and scatters the
            rows.
        use_local_output: return a plain tensor, else a DTensor.

    Errors are raised when the style is applied.

    Raises:
        ValueError: the output has another layout; else as in :class:`ColwiseParallel`.
        NotImplementedError: as in :class:`ColwiseParallel`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LinearLayer):
            return super()._apply(module, device_mesh)
        (layout,) = self.output_layouts
        rows, given = _rows_dim(layout, "output_layouts"), self.output_layouts
        _place(module, device_mesh, "row", rows is not None, getattr(self, "src_data_rank", 0))
        return _hooked(
            module, device_mesh, self.input_layouts, (_COLUMNS,), given, given, rows, self.use_local_output
        )


class SequenceParallel(style.SequenceParallel):
    """``LayerNorm`` or ``RMSNorm`` on a row shard; arguments as in PyTorch's class.

    The gradients of its parameters are DTensors of partial sums, which FSDP2 and optimizers reduce.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, NormParameters):
            return super()._apply(module, device_mesh)
        _distribute(module, device_mesh, {}, 0)
        rows = self.sequence_sharding
        return _hooked(module, device_mesh, rows, rows, rows, rows, None, self.use_local_output)


def _rows_dim(layout: Placement, name: str) -> int | None:
    """Return the dim that ranks share the rows of; None if each has all of them.

    Raises:
        ValueError: another layout.
    """
    if layout.is_replicate():
        return None
    if not isinstance(layout, Shard) or layout.dim < 0:
        raise ValueError(
            f"{name} is {layout}; use Replicate(), or Shard(dim) of a dim counted from the front"
        )
    return layout.dim


def _place(layer: LinearLayer, mesh: DeviceMesh, mode: str, shares_rows: bool, source: int | None) -> None:
    """Make the parameters DTensors, and the layer one that is split over the mesh.

    Raises:
        ValueError, NotImplementedError: as :class:`ColwiseParallel`.
    """
    if not isinstance(layer, (Linear, LayerNormLinear)) or (
        mode == "row" and isinstance(layer, LayerNormLinear)
    ):
        raise NotImplementedError(
            f"{a_kind(layer)} cannot be made {mode} parallel; make it with tp_group=mesh.get_group(), and "
            "parallel_mode or set_parallel_mode"
        )
    weight: Any = own_parameters(layer).get("weight")
    obstacles = {
        f"tp_size={layer.tp_size}": layer.tp_size > 1,
        "parameters_split": bool(layer._parts),
        "fuse_wgrad_accumulation": layer.fuse_wgrad_accumulation,
        "delay_wgrad_compute": layer.delay_wgrad_compute,
        "quantized parameters": how_stored(weight) == "codes",
        "several outputs": layer.return_bias or getattr(layer, "return_layernorm_output", False),
        "a mesh of several dims": mesh.ndim != 1,
    }
    for what, there in obstacles.items():
        if there:
            raise ValueError(
                f"{type(layer).__name__} with {what} cannot be parallelized; use tp_group= for such"
            )
    parallel, column = parallel_of({"": mode}, mesh.get_group(), mesh.size(), shares_rows), mode == "column"
    layer.in_features, (layer.out_features,) = parallel.local_features(
        layer.in_features, [layer.out_features]
    )
    layer._placed, layer.parallel_mode = True, mode
    layer._bias_behind = "" if column or parallel.size == 1 else "bias"
    layer._init_tensor_parallel(parallel)
    _distribute(
        layer, mesh, {"weight": Shard(0), "bias": Shard(0)} if column else {"weight": Shard(1)}, source
    )


def _distribute(module: nn.Module, mesh: DeviceMesh, split: dict[str, Shard], source: int | None) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = distribute_tensor(parameter.data, mesh, [split.get(name, Replicate())], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))


def _hooked(
    module: nn.Module,
    mesh: DeviceMesh,
    given: tuple[Placement, ...],
    read: tuple[Placement, ...],
    computed: tuple[Placement, ...],
    wanted: tuple[Placement, ...],
    rows: int | None,
    local: bool,
) -> nn.Module:
    """Return a layer between what comes, plain or DTensor, and what it computes on.

    Args:
        given: layout of plain inputs.
        read: of those that the layer computes on.
        computed: of its output.
        wanted: layout of the result.
        rows: the dim of the rows, which the layer has first.
        local: return a plain tensor.
    """
    module.register_forward_pre_hook(functools.partial(_local_input, mesh, given, read, rows))
    module.register_forward_hook(functools.partial(_placed_output, mesh, computed, wanted, rows, local))
    return module


def _local_input(
    mesh: Any, given: Any, read: Any, rows: int | None, module: Any, args: tuple[Any, ...]
) -> Any:
    inp, *rest = args
    if not isinstance(inp, DTensor) and given != read:
        inp = DTensor.from_local(inp, mesh, given, run_check=False)
    if isinstance(inp, DTensor):
        inp = inp.redistribute(placements=_counted(read, inp.ndim)).to_local()
    return (_rows_first(inp, rows), *rest)


def _placed_output(
    mesh: Any, computed: Any, wanted: Any, rows: int | None, local: bool, module: Any, args: Any, out: Tensor
) -> Tensor:
    out = _rows_first(out, rows)
    computed, wanted = _counted(computed, out.dim()), _counted(wanted, out.dim())
    if local and computed == wanted:
        return out
    placed = DTensor.from_local(out, mesh, computed, run_check=False).redistribute(placements=wanted)
    return placed.to_local() if local else placed


def _rows_first(x: Tensor, rows: int | None) -> Tensor:
    """Return rows to the front, and back again."""
    return x.transpose(0, rows) if rows else x


def _counted(placements: tuple[Placement, ...], dims: int) -> tuple[Placement, ...]:
    """Return the layout with dims counted from the front."""
    return tuple(Shard(one.dim % dims) if isinstance(one, Shard) else one for one in placements)
