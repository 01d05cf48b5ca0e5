"""``Linear``: a linear layer as operations, which fuse with their neighbors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import a_kind, flags
from ..layers import names_apart, state_names
from .basic.basic_linear import BasicLinear
from .basic.bias import Bias
from .basic.collective import AllReduce, ReduceScatter
from .op import BasicOperation, CompositeOperation


class Linear(CompositeOperation):
    """y = x w^T + b as a :class:`BasicLinear` and a :class:`Bias`, quantized under the current recipe.

    With ``tensor_parallel_mode="row"`` every process adds its own bias to its product. A :class:`ReduceScatter` with
    ``sequence_parallel``, else an :class:`AllReduce`, sums them: y = sum over the processes of (x w^T + b), as in
    Transformer Engine. The effective bias is the sum of the biases, and each gets the gradient of that sum, from all
    rows.

    Args:
        in_features, out_features: sizes of the last dim of input and output, of all processes together.
        bias: add a learned (out_features,) bias.
        device, dtype, tensor_parallel_group, sequence_parallel, rng_state_tracker_function, accumulate_into_main_grad,
            name: as in :class:`BasicLinear`.
        tensor_parallel_mode: "column" also splits the bias; "row" gives every process its own bias of all
            ``out_features``. Without a bias, a "row" layer is one :class:`BasicLinear`, which sums itself and gathers
            gradients quantized.
    Raises:
        ValueError: as in :class:`BasicLinear`.

    ``weight`` and ``bias`` belong to the operations. The state dict has their keys, ``basic_ops.0.weight`` and
    ``basic_ops.1.bias``; loading also takes ``weight`` and ``bias``, as written by :class:`narrowcast.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        name: str | None = None,
    ) -> None:
        flags(bias=bias)
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
            name=name,
        )
        operations: list[BasicOperation] = [linear]
        if bias:
            parallel = linear.parallel
            column = parallel.mode == "column"
            operations.append(
                Bias(
                    out_features,
                    device=device,
                    dtype=dtype,
                    tensor_parallel=column,
                    tensor_parallel_group=tensor_parallel_group if column else None,
                )
            )
            if parallel.mode == "row":
                linear._leave_sum()
                collective = ReduceScatter if parallel.sequence_parallel else AllReduce
                operations.append(collective(tensor_parallel_group))
        super().__init__(operations)
        self.in_features, self.out_features = in_features, out_features

    def extra_repr(self) -> str:
        """Return sizes, as printed by the module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )

    @property
    def weight(self) -> Tensor:
        """Weight of this process, (out_features, in_features) if it is whole; may be assigned."""
        linear: Any = self.basic_ops[0]
        return linear.weight

    @weight.setter
    def weight(self, value: nn.Parameter) -> None:
        self.register_parameter("weight", value)

    @property
    def bias(self) -> Tensor | None:
        """Bias of this process; None for a layer without. May be assigned if there is one."""
        added: Any = self.basic_ops[1] if len(self.basic_ops) > 1 else None
        return None if added is None else added.bias

    @bias.setter
    def bias(self, value: nn.Parameter) -> None:
        self.register_parameter("bias", value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Hand a new weight or bias to the operation that owns it.

        Raises:
            AttributeError: a bias for a layer without one, or another name.
            TypeError: no parameter.
        """
        owners: dict[str, BasicOperation] = dict(zip(("weight", "bias"), self.basic_ops))
        if name not in owners:
            has = " and ".join(owners)
            raise AttributeError(
                f"this Linear has {has}, no {name}; make it with bias=True, or keep {name} elsewhere"
            )
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"{name} is {a_kind(param)}; assign an nn.Parameter")
        setattr(owners[name], name, param)

    def reset_parameters(self) -> None:
        """Initialize weight and bias; those on the meta device are first made on the default device."""
        operations: Any = self.basic_ops
        for operation in operations[:2]:  # a collective after them has no parameters
            operation.reset_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for theirs, ours in _names_of_a_module(state_dict, prefix).items():
            if ours not in state_dict:
                state_dict[ours] = state_dict.pop(theirs)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _names_of_a_module(state_dict: dict[str, Any], prefix: str) -> dict[str, str]:
    """Return keys of the form that :class:`narrowcast.Linear` writes -> those of the operations."""
    names = {prefix + "weight": prefix + "basic_ops.0.weight", prefix + "bias": prefix + "basic_ops.1.bias"}
    renamed = {theirs: ours for theirs, ours in names.items() if theirs in state_dict}
    for name in (*state_names(""), *names_apart("")):
        if prefix + name in state_dict:
            renamed[prefix + name] = f"{prefix}basic_ops.0.{name}"
    return renamed
