"""The experts of a mixture whose weights are 3-D parameters, as Transformers 5 keeps them, on grouped GEMMs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._tracing import can_check
from ..autograd import Groups, LinearFwdArgs, LinearWgrad, grouped_linear, traced_grouped
from ..functional.collectives import sum_over
from ..layers import LinearLayer, Stage, checked_input
from ..layers.grouped_layer import check_format, grouped_buffers_of, plan_for_rows
from ..moe import moe_permute, moe_unpermute
from ..tensors import GroupedTensor, grouped_layout
from ..upstream.modules import own_parameters


class Stack(NamedTuple):
    """The 3-D parameters of a module of experts, in the order of its forward.

    ``transposed``: they are (E, K, N), not (E, N, K). ``biased``: each has ``<name>_bias`` (E, N). ``every``: each
    expert multiplies every token, not only those that a router sends to it.
    """

    weights: tuple[str, ...]
    transposed: bool = False
    biased: bool = False
    every: bool = False


class Exchange(Protocol):
    """What sends rows to the ranks of their experts, as ``distributed.MoEDispatch`` does."""

    num_local_experts: int
    part: tuple[int, int]

    def __call__(
        self, x: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int, experts: Any
    ) -> Tensor:
        """Return the weighted sum of the experts' results."""
        ...


class _ScaledGradient(torch.autograd.Function):
    """A tensor whose gradient is scaled on its way back, and summed over ranks that hold the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, replicas: str) -> Tensor:
        ctx.factor, ctx.replicas = factor, replicas
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        scaled = grad * ctx.factor
        return sum_over(scaled, ctx.replicas) if ctx.replicas else scaled, None, None


class StackedExpertsLayer(LinearLayer):
    """Base of experts whose linear layers are stacked in 3-D parameters, and run as the current recipe says.

    The number of experts is ``num_experts`` of the module. A kind of experts says in ``is_kind_of`` which modules it
    replaces, in ``stack_of`` what their parameters are, and has their forward.
    """

    _module_type = "grouped_linear"
    _watcher: Any = None
    """What observes the operands of the grouped GEMMs, as ``inspect.watch`` sets it."""
    _exchange: Exchange | None = None
    """What brings the tokens of other ranks, as ``distributed.expert_parallel`` sets it."""
    _gradient_factor: float = 1.0
    _replicas: str = ""
    """Group of the ranks that hold the same experts, over which gradients are summed; "" without."""

    @staticmethod
    def is_kind_of(module: Any) -> bool:
        """Return whether the module, not converted yet, has this kind's parameters and forward."""
        raise NotImplementedError

    @staticmethod
    def stack_of(module: Any) -> Stack:
        """Return the parameters of a module of this kind, converted or not."""
        raise NotImplementedError

    def _take_over(self, name: str) -> None:
        """Set up the layer around the parameters of the experts that it was."""
        weights = self.stack_of(self).weights
        alone = len(weights) == 1
        stages = tuple(
            Stage(
                "" if alone else f"{weight}_",
                name if alone else f"{name}.{weight}".lstrip("."),
                weight,
                f"{weight}_bias",
            )
            for weight in weights
        )
        self._groups = int(self.num_experts)  # type: ignore[arg-type]
        LinearLayer.__init__(self, name, stages, getattr(self, weights[0]).device)

    def exchange_tokens(self, exchange: Exchange, gradient_factor: float, replicas: str = "") -> None:
        """Compute with this rank's experts, whose parameters are sharded over dim 0, on the tokens of all ranks.

        Args:
            exchange: sends tokens to the ranks of their experts.
            gradient_factor: what gradients of the parameters are multiplied by.
            replicas: group of the ranks that hold the same experts; their gradients are summed.
        """
        # no submodule: it has no parameters, and the names of the model stay
        vars(self).update(_exchange=exchange, _gradient_factor=gradient_factor, _replicas=replicas)
        self.part_of_experts, self._groups = exchange.part, exchange.num_local_experts
        states = self._delayed
        self._delayed = {}
        for name in self._state_names():  # of this rank's experts; a checkpoint would hold those of one rank
            self.register_buffer(name, None, persistent=False)
        for prefix, delayed in states.items():
            self._keep_state(prefix, delayed)

    def _parts_of(self, name: str) -> list[Tensor]:
        parts: list[Any] = super()._parts_of(name)
        return parts if self._exchange is None else [part.to_local() for part in parts]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self._exchange is not None:  # of all experts, or of another rank's
            state = {prefix + name for name in self._state_names()}
            state_dict = {key: value for key, value in state_dict.items() if key not in state}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _takes_rows(self, storage_name: str) -> bool:
        # the backward transposes groups in common buffers, not groups in separate ones
        return grouped_layout(storage_name) != "split"

    def takes_codes(self) -> bool:
        return super().takes_codes() and self._exchange is None and not self.stack_of(self).transposed

    def _stored(self, name: str) -> Tensor:
        """Return a parameter as this rank multiplies with it."""
        stored = getattr(self, name)
        if self._exchange is None:
            return stored
        if can_check() and torch.is_grad_enabled() and getattr(stored, "has_replicas", False):
            raise RuntimeError(
                f"other ranks may hold the same experts as {type(self).__name__}, and nothing sums the gradients: give "
                "expert_parallel the mesh of both dims, or fully_shard the experts over the other dim before their "
                "block; has_replicas=False if no rank does"
            )
        return _ScaledGradient.apply(stored.to_local(), self._gradient_factor, self._replicas)

    def _matrices(self, stage: Stage) -> list[Tensor]:
        stored = self._stored(stage.weight)
        return [stored.transpose(1, 2) if self.stack_of(self).transposed else stored]

    def _grouped(self, stage: Stage, x: Tensor, splits: Tensor) -> Tensor:
        """Return one linear layer of every expert; rows beyond the sum of the splits become zero."""
        stored: Any = getattr(self, stage.weight)
        (weight,) = self._matrices(stage)
        biases: list[Any] = [self._stored(stage.bias)] if self.stack_of(self).biased else []
        x = checked_input(self, x, "in_features", stored, weight.shape[2])
        watcher = self._watcher
        if watcher is not None and stage is self._stages[0]:
            x = watcher.observe_input(self, stage, x, x.detach(), splits)
        plan = self._plan(self._recipe_in_force(), stage, x.requires_grad, stored)
        plan = plan_for_rows(plan, x.shape[0], self._groups)
        needs_bias = torch.is_grad_enabled() and any(bias.requires_grad for bias in biases)
        scales = self._scales_of((stage.prefix,), (plan,))[0]
        codes, turns, decoded = None, False, None
        if plan.quantized and isinstance(stored, GroupedTensor) and self._decodes:
            decoded = grouped_buffers_of(stored)
        elif plan.quantized and isinstance(
            stored, GroupedTensor
        ):  # a copy, or as nc.distributed.shard gathers it
            check_format(self, stored, plan.kept_weight)
            codes = grouped_buffers_of(stored)
            turns = plan.needs_input and plan.backward_override is None and not codes.columnwise
        elif plan.quantized and self._reads_written():
            codes = self._kept_weight(stage.weight, plan.kept_weight, [stored.detach()])
        how = turns, None, decoded
        args = LinearFwdArgs(plan, x.dtype, scales, codes, LinearWgrad(), needs_bias, *how)
        groups = Groups(self._groups, weight.shape[1], weight.shape[2], False, False, False)
        y = (traced_grouped if is_dynamo_compiling() else grouped_linear)(
            x, splits, [weight], biases, args, groups
        )
        if watcher is not None and stage is self._stages[-1]:
            y = watcher.observe_gradient(self, stage, y, splits)
        return y


class ExpertsLayer(StackedExpertsLayer):
    """Experts of two linear layers each, on the tokens that a router sent them: Mixtral, Qwen-MoE, DeepSeek and others.

    Read off the module: ``num_experts`` E; ``gate_up_proj``, or ``up_proj`` where ``has_gate`` is False, and
    ``down_proj``, (E, N, K), or (E, K, N) where ``is_transposed``; ``<name>_bias`` (E, N) where ``has_bias``;
    ``_apply_gate`` or ``act_fn`` between the two; ``post_expert_norm`` where ``has_post_expert_norm`` says so.
    """

    _routed = True
    """It sees the choice of the router."""

    @staticmethod
    def is_kind_of(module: Any) -> bool:
        """Return whether it says of itself what the experts of Transformers 5 say."""
        if not all(
            hasattr(module, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed")
        ):
            return False
        names = ExpertsLayer.stack_of(module).weights
        biases = [f"{name}_bias" for name in names] if module.has_bias else []
        return (
            hasattr(module, "_apply_gate" if module.has_gate else "act_fn")
            and _are_stacked(module, names)
            and all(own_parameters(module).get(name) is not None for name in biases)
        )

    @staticmethod
    def stack_of(module: Any) -> Stack:
        """Return the two parameters that the module's ``has_`` and ``is_`` attributes tell of."""
        first = "gate_up_proj" if module.has_gate else "up_proj"
        return Stack((first, "down_proj"), module.is_transposed, module.has_bias)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts.

        Args:
            hidden_states: (T, hidden).
            top_k_index, top_k_weights: (T, k), the experts of each token and their weights. A number that is no
                expert's, as expert parallelism has for those of other ranks, adds nothing.
        Returns:
            (T, hidden), the weighted sum over each token's experts.
        """
        if self._exchange is not None:
            return self._forward_over_ranks(hidden_states, top_k_index, top_k_weights)
        experts = top_k_index.reshape(-1).clamp(max=self._groups)
        rows_of_each = experts.new_zeros(self._groups + 1).scatter_add(0, experts, torch.ones_like(experts))
        splits = rows_of_each[: self._groups]
        if self._watcher is not None:
            self._watcher.observe_load(self, splits)
        chosen = torch.where(top_k_index < self._groups, top_k_index, -1).to(torch.int32)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        x, row_map = moe_permute(x, chosen, map_type="index")
        x = self._run(x, splits)
        return moe_unpermute(x, row_map, top_k_weights, map_type="index").to(hidden_states.dtype)

    def _run(self, x: Tensor, splits: Tensor) -> Tensor:
        """Apply the experts to rows that are sorted by expert."""
        x = self._grouped(self._stages[0], x, splits)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)  # type: ignore[operator]
        x = self._grouped(self._stages[1], x, splits)
        # Transformers 5.17 has no experts with such a norm, and does not say so.
        normed = getattr(self, "has_post_expert_norm", False)
        return self.post_expert_norm(x) if normed else x  # type: ignore[operator]

    def _forward_over_ranks(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts of all ranks to this rank's tokens."""
        assert self._exchange is not None
        tokens, chosen = top_k_index.shape
        is_chosen = top_k_index.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)  # type: ignore[arg-type]
        probs = torch.where(is_chosen, top_k_weights.unsqueeze(-1), 0).sum(1)
        routing_map = is_chosen.any(1)
        if self._watcher is not None:
            self._watcher.observe_load(self, routing_map.sum(0))
        flat = x.reshape(tokens, x.shape[-1])
        return self._exchange(flat, probs, routing_map, tokens * chosen, self._run).to(x.dtype)


class EqualExpertsLayer(StackedExpertsLayer):
    """Experts that all multiply every token, scaled by the router before and zero where not chosen: Llama 4.

    Read off the module: ``gate_up_proj`` (E, K, 2 I), ``down_proj`` (E, I, K), ``act_fn`` of the gate.
    """

    @staticmethod
    def is_kind_of(module: Any) -> bool:
        """Return whether it runs as ``Llama4TextExperts`` of Transformers, by name and parts."""
        return (
            runs_as(module) == "Llama4TextExperts"
            and hasattr(module, "act_fn")
            and _are_stacked(module, EqualExpertsLayer.stack_of(module).weights)
        )

    @staticmethod
    def stack_of(module: Any) -> Stack:
        """Return the two parameters."""
        return Stack(("gate_up_proj", "down_proj"), transposed=True, every=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the experts to ``hidden_states`` (E T, hidden), the tokens once for each expert."""
        if self._exchange is not None:
            return self._forward_over_ranks(hidden_states)
        rows = hidden_states.shape[0] // self._groups
        splits = torch.full((self._groups,), rows, dtype=torch.int64, device=hidden_states.device)
        return self._run(hidden_states, splits)

    def _run(self, x: Tensor, splits: Tensor) -> Tensor:
        gate, up = self._grouped(self._stages[0], x, splits).chunk(2, dim=-1)
        return self._grouped(self._stages[1], up * self.act_fn(gate), splits)  # type: ignore[operator]

    def _forward_over_ranks(self, x: Tensor) -> Tensor:
        """Apply the experts of all ranks to the rows that the router scaled by more than 0; others stay 0."""
        assert self._exchange is not None
        experts = torch.arange(self.num_experts, device=x.device)  # type: ignore[arg-type]
        own = experts.repeat_interleave(x.shape[0] // self.num_experts)  # type: ignore[operator]
        routing_map = (own.unsqueeze(1) == experts) & (x != 0).any(1, keepdim=True)
        return self._exchange(x, routing_map.to(x.dtype), routing_map, x.shape[0], self._run)


class ParallelExpertsLayer(StackedExpertsLayer):
    """One linear layer per expert, on rows that are sorted by expert: JetMoE.

    Read off the module: ``weight`` (E, N, K).
    """

    @staticmethod
    def is_kind_of(module: Any) -> bool:
        """Return whether it runs as ``JetMoeParallelExperts`` of Transformers, by name and parts."""
        return runs_as(module) == "JetMoeParallelExperts" and _are_stacked(module, ("weight",))

    @staticmethod
    def stack_of(module: Any) -> Stack:
        """Return the one parameter."""
        return Stack(("weight",))

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Apply the experts to ``inputs`` (T, K), of which each has ``expert_size`` rows, one after the other."""
        splits = torch.as_tensor(expert_size, dtype=torch.int64, device=inputs.device)
        return self._grouped(self._stages[0], inputs, splits)


EXPERTS = (ExpertsLayer, EqualExpertsLayer, ParallelExpertsLayer)
"""The kinds of experts that are converted."""


def is_transposed(layer: Any) -> bool:
    """Return whether a layer's parameters hold its matrices transposed."""
    return isinstance(layer, StackedExpertsLayer) and layer.stack_of(layer).transposed


def runs_as(module: nn.Module) -> str:
    """Return the class whose forward the module has, by name: the package that defines it is not imported."""
    return next(cls.__name__ for cls in type(module).__mro__ if "forward" in cls.__dict__)


def _are_stacked(module: Any, names: tuple[str, ...]) -> bool:
    weights = [own_parameters(module).get(name) for name in names]
    return all(one is not None and one.dim() == 3 and one.shape[0] == module.num_experts for one in weights)
