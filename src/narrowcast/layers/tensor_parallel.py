"""Options of modules that are split over processes, and the marks on their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import flags, is_one_of, shown
from ..autograd.tensor_parallel import MODES, TensorParallel
from ..functional.collectives import group_name, group_size, registered_name
from ..upstream.c10d import group_named

NO_GROUP = ""
"""Instead of a group's name, where ``set_tensor_parallel_group`` is still to come."""


class Parallel(NamedTuple):
    """How a layer is split over processes, read from its constructor's options by :func:`parallel_of`.

    ``modes``: how each stage is split, by its prefix. ``size``: how many processes share the layer. ``group``: their
    group's name, or ``NO_GROUP``. ``sequence_parallel``: outside of the layer, each holds a share of the rows.
    ``tracker``, ``tracker_name``: of the random numbers of its weights.
    """

    modes: dict[str, str | None]
    size: int = 1
    group: str | None = NO_GROUP
    sequence_parallel: bool = False
    tracker: Callable[[], Any] | None = None
    tracker_name: str | None = None

    @property
    def mode(self) -> str | None:
        """How a layer of one stage without prefix is split."""
        return self.modes.get("")

    def local_features(self, in_features: int, rows: list[int]) -> tuple[int, list[int]]:
        """Return what this process has of a weight: its columns, and the rows of each part.

        Raises:
            ValueError: they do not divide.
        """
        if self.mode == "column":
            return in_features, [shared("out_features", own, self.size) for own in rows]
        return shared("in_features", in_features, self.size) if self.mode == "row" else in_features, rows


class Split(NamedTuple):
    """How ranks share one dim of a parameter, each holding an equal part.

    Attributes:
        dim: the dim; None for ranks that hold other parameters, such as experts that are one parameter each.
        group: name of the ranks' group; None for the default one.
        ranks: how many they are.
        by: what splits: "tensor", "experts" or "mesh" (of a DTensor).
        blocks: sizes of blocks along the dim, each shared by itself, as a rank holds them one after the other; empty
            for one block.
    """

    dim: int | None
    group: str | None
    ranks: int
    by: str
    blocks: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return torch.distributed.get_rank(group_named(registered_name(self.group)))


def parallel_of(
    modes: dict[str, str | None],
    tp_group: Any,
    tp_size: int,
    sequence_parallel: bool,
    tracker: Callable[[], Any] | None = None,
    tracker_name: str | None = None,
) -> Parallel:
    """Read the options of a constructor.

    Raises:
        ValueError: another mode than None, "column" and "row", a ``tp_size`` that is not positive or not that of the
            group, or a ``tracker_name`` without ``tracker``.
        TypeError, RuntimeError: no process group, or one without a name.
    """
    flags(sequence_parallel=sequence_parallel)
    for mode in modes.values():
        if not is_one_of(mode, MODES):
            raise ValueError(f"parallel_mode is {shown(mode)}; use None, 'column' or 'row'")
    size = checked_size(tp_group, tp_size)
    if tracker_name is not None and tracker is None:
        raise ValueError(
            f"rng_tracker_name is {shown(tracker_name)} without get_rng_state_tracker; give both or neither"
        )
    group = NO_GROUP if tp_group is None else group_name(tp_group, "tp_group")
    return Parallel(modes, size, group, bool(sequence_parallel), tracker, tracker_name)


def ranks_of(
    tp_group: Any, tp_size: int, set_parallel_mode: bool, sequence_parallel: bool
) -> tuple[Any, int, bool]:
    """Return group and number of the ranks among which heads and weights are split, and whether the sequence is, too.

    Those of the group, if it is known; one without ``set_parallel_mode``.
    """
    flags(set_parallel_mode=set_parallel_mode, sequence_parallel=sequence_parallel)
    if not set_parallel_mode:
        return None, 1, False
    size = checked_size(tp_group, tp_size)
    return tp_group, size, sequence_parallel and size > 1


class TensorParallelLayer:
    """Base of layers that may be split over processes; others have the values of the class.

    ``tp_size``: how many processes share the layer. ``sequence_parallel``: outside it, each holds a share of the
    rows. ``parallel_mode``: None, "column" or "row", as requested.
    """

    tp_size: int = 1
    sequence_parallel: bool = False
    parallel_mode: str | None = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    rng_tracker_name: str | None = None
    # prefix of a stage -> how it is split; None if none is
    _parallel: dict[str, TensorParallel] | None = None
    # the parameters are DTensors of a tensor-parallel mesh, and the layer computes on its part of each
    _placed: bool = False
    # PyTorch's own style made them so: what comes and what is returned are DTensors, which the style redistributes
    _on_dtensors: bool = False
    # sizes of the blocks of rows of a weight and its bias, by the weight's name, where each is split by itself
    _row_blocks: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    # a bias of this name is added to the sum over the processes, not to this process's part of it
    _bias_behind: str = ""

    def _init_tensor_parallel(self, parallel: Parallel) -> None:
        if parallel.tracker is not None:
            self.get_rng_state_tracker, self.rng_tracker_name = parallel.tracker, parallel.tracker_name
        if parallel.size == 1:
            return
        self.tp_size, self.sequence_parallel = parallel.size, parallel.sequence_parallel
        split = {
            prefix: TensorParallel(mode, parallel.group, parallel.sequence_parallel)
            for prefix, mode in parallel.modes.items()
            if mode
        }
        self._parallel = split or None

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the processes that share the layer; for a layer made with ``tp_size`` alone.

        Args:
            tp_group: a process group of ``tp_size`` processes, or its name; None for a layer that is not split.
        Raises:
            ValueError: a group of another size.
            TypeError: no process group.
            RuntimeError: one without a name.
        """
        if tp_group is None and self.tp_size == 1:
            return
        name = None if tp_group is None else group_name(tp_group, "tp_group")
        size = None if name is None else group_size(name)
        if size != self.tp_size:
            found = "None" if size is None else f"of {size} processes"
            raise ValueError(
                f"tp_group is {found}, and the layer was made for tp_size={self.tp_size}; give that many"
            )
        if self._parallel is not None:
            self._parallel = {
                prefix: TensorParallel(parallel.mode, name, parallel.sequence_parallel)
                for prefix, parallel in self._parallel.items()
            }

    def _split_over(self, prefix: str) -> TensorParallel | None:
        """Return how a stage is split.

        Raises:
            RuntimeError: it is, and the group was not given yet.
        """
        parallel = None if self._parallel is None else self._parallel.get(prefix)
        if parallel is not None and parallel.group == NO_GROUP:
            raise RuntimeError(
                f"{type(self).__name__} was made with tp_size={self.tp_size} and no tp_group; call "
                "set_tensor_parallel_group(group) before the first forward"
            )
        return parallel

    def _split_of(self, name: str) -> Split | None:
        """Return how ranks share one of the layer's own parameters; None if each has all of it, or it is a DTensor."""
        return None

    def _part(self, name: str) -> Any:
        """Return a parameter as the layer computes with it: of a DTensor this process's part.

        The gradient of a whole one that was used on a share of the rows is, as a DTensor, a sum still to be made.
        """
        parameter: Any = getattr(self, name)
        if not self._placed or parameter is None:
            return parameter
        if self._on_dtensors and self.parallel_mode == "row" and name == "bias":
            return local_part(parameter, True) / parameter.device_mesh.size()  # a summand, as its gradient is
        return local_part(parameter, self.sequence_parallel and self._of_rows(name))

    def _of_rows(self, name: str) -> bool:
        return name.startswith("layer_norm_") or name == self._bias_behind

    @property
    def _shares_rows(self) -> bool:
        return self.sequence_parallel and self.tp_size > 1


def local_part(parameter: Any, to_be_summed: bool) -> Any:
    """Return this process's part of a DTensor, differentiable.

    Args:
        to_be_summed: the gradient of it is that of a share of the rows.
    """
    if not to_be_summed:
        return parameter.to_local()
    return parameter.to_local(grad_placements=[torch.distributed.tensor.Partial()])  # type: ignore[attr-defined]


def on_local(layer: Any, inp: Any, *options: Any) -> Any:
    """Run a layer under PyTorch's style on this process's part of a DTensor; return the output as a DTensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    column, mesh = layer.parallel_mode == "column", inp.device_mesh
    inp = inp.redistribute(placements=[Replicate() if column else Shard(inp.ndim - 1)])
    out = layer.forward(inp.to_local(grad_placements=[Partial()] if column else None), *options)
    return DTensor.from_local(out, mesh, [Shard(out.dim() - 1) if column else Partial()], run_check=False)


def checked_size(tp_group: Any, tp_size: int) -> int:
    """Return how many processes share a layer, from its two options.

    Raises:
        ValueError: a size that is not positive, or not that of the group.
        TypeError, RuntimeError: no process group, or one without a name.
    """
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ValueError(f"tp_size is {shown(tp_size)}; use a positive number of processes")
    if tp_group is None:
        return tp_size
    size = group_size(group_name(tp_group, "tp_group"))
    if tp_size not in (1, size):
        raise ValueError(f"tp_size is {tp_size}, and tp_group has {size} processes; leave tp_size out")
    return size


def shared(label: str, features: int, size: int) -> int:
    """Return the number of features per process, of ``size`` processes.

    Raises:
        ValueError: they do not divide.
    """
    if features % size:
        raise ValueError(
            f"{label}={features} does not divide among tp_size={size} processes; use a multiple of tp_size={size}"
        )
    return features // size


def mark_partition(parameter: Tensor, dim: int) -> None:
    """Mark a parameter as split along ``dim``, with the attributes that Megatron-LM reads."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim, parameter.partition_stride = dim, 1  # type: ignore[attr-defined]
