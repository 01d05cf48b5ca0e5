"""``shard``: FSDP2 that gathers the weights of low-precision layers quantized, one byte per element."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks, _keywords
from .._checks import a_kind, shown
from .._device import HIGH_PRECISION
from .._tracing import can_check
from ..formats import MX_BLOCK, NVFP4_BLOCK
from ..layers import DelayedLayer, GroupedLinearLayer, LinearLayer, Stage, renew_with
from ..layers.described import describe_tensor, how_stored
from ..layers.parameters import weight_quantizer
from ..layers.replicas import check_gradients_are_reduced
from ..layers.set_recipe import Model
from ..ops import FusibleOperation
from ..quantizers import (
    DelayedFloat8Quantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from ..recipe import LinearPlan, Recipe, linear_plan
from ..state import checked_recipe, starts_a_step
from ..tensors import QuantizedTensor
from ..upstream.compiler import traces_own_hooks
from ..upstream.fsdp import (
    gathers_in_backward,
    gradient_dtypes,
    has_reduction_hook,
    keeps_after_backward,
    parameter_groups,
    reshard,
    sharded_parts,
)
from ..upstream.modules import own_children, own_parameters
from .shard_receipt import ShardedParameter, ShardReceipt
from .sharded_weight import ShardedWeight, WeightGather
from .weight_scales import ScaledWeight, WeightScales, synchronizes

_TILE = 128
_PER_TENSOR = (Float8CurrentScalingQuantizer, DelayedFloat8Quantizer)


def shard(
    model: Model,
    mesh: Any = None,
    *,
    blocks: Iterable[nn.Module] = (),
    recipe: Recipe | str | None = None,
    quantized_gather: bool = True,
    recompute: bool = True,
    **options: Any,
) -> Model:
    """Apply ``torch.distributed.fsdp.fully_shard`` to blocks and model, in place, and gather weights quantized.

    Shards stay in high precision for the optimizer and for checkpoints. Every gather moves the codes, one byte per
    element, and the scales of blocks; layers multiply with them and quantize no weight. The bits equal quantizing the
    gathered weight. Per-tensor scales take one all-reduce for all weights, in the forward of ``model``; none in later
    forwards of a step under ``model.set_requires_gradient_sync(False)``. Under delayed scaling each step reduces the
    amaxes of activations and gradients over ``mesh``, as ``set_recipe(model, recipe, amax_group=...)`` does.

    If ``mp_policy`` computes in 16 bits and FSDP2 reduces in fp32, gradients are sent in 16 bits and summed in fp32,
    with FSDP2's sums. ``set_custom_reduce_scatter`` replaces this reduction.

    A weight is gathered quantized if its recipe has one scale for the tensor (``Float8CurrentScaling``,
    ``DelayedScaling``), or square tiles (``Float8BlockScaling``, ``NVFP4BlockScaling``, ``MXFP8BlockScaling`` with
    ``enable_2d_quantization``), and its rows divide into equal shards, of whole 128 rows for tiles. Plain
    ``MXFP8BlockScaling`` quantizes rows and columns differently. With ``recompute=False`` its weights are gathered by
    direction: row-wise for the forward, column-wise for the backward. All other weights are gathered by FSDP2 and
    quantized by their layers; the receipt says why. Weights stored quantized always have shards of codes and scales.

    Args:
        model: the same on every rank, with recipes, also on the meta device. Call this module itself.
        mesh: one dim of ranks that share parameters, or two, the first for replicas; default: all ranks.
        blocks: modules of the model that are gathered separately, inner ones first; compile them before or after.
        recipe: a recipe or its name for layers without their own, which run in an ``autocast``.
        quantized_gather: False gathers every weight in high precision.
        recompute: False declares that the backward reruns no part of a forward (activation checkpointing), and that
            gathered weights are freed after every forward and backward.
        **options: of ``fully_shard``, for blocks and model.
    Returns:
        ``model``; ``narrowcast.receipt(model).sharding`` lists how each parameter is gathered.
    Raises:
        ValueError: a layer has ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute``, whose gradients bypass FSDP2's
            reduction, ``reshard_after_forward`` is a number of ranks, a block is not part of the model, or the dims of
            a mesh have no names.
        TypeError: an argument is not a recipe, mesh, policy or list of blocks, or an option is unknown.
        RuntimeError: the rows of a weight stored quantized are not equal shards of whole blocks, a block's compiled
            call would trace FSDP2's hooks, model or block is sharded already, or there is neither a mesh nor a
            process group.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    _checks.module("model", model)
    recipe, blocks = checked_recipe(recipe, "shard"), _checked_blocks(model, blocks)
    named = inspect.unwrap(shard).__kwdefaults__
    _keywords.check("shard", (*named, *inspect.signature(fully_shard).parameters), options)
    sharded = next((one for one in (*blocks, model) if isinstance(one, FSDPModule)), None)
    if sharded is not None:
        raise RuntimeError(
            f"{a_kind(sharded)} is sharded already; call shard once, on a model that fully_shard has not sharded, and "
            "name modules that are gathered separately in blocks="
        )
    _check_compiled([*blocks, model])
    check_gradients_are_reduced(model, "FSDP2")
    _check_options(mesh, quantized_gather, options)
    policy, reshard = options.get("mp_policy"), options.get("reshard_after_forward")
    if mesh is None:
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "shard: there are no ranks to share the parameters; start the script with torchrun and call "
                "torch.distributed.init_process_group() first, or pass mesh="
            )
        kind = next((p.device.type for p in model.parameters() if not p.is_meta), None)
        accelerator = torch.accelerator.current_accelerator() if kind is None else None
        kind = kind or (accelerator.type if accelerator is not None else "cpu")
        mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),))
    over = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 and mesh.mesh_dim_names else mesh
    dtype = None if policy is None else policy.param_dtype
    _check_stored(model, over.size(), options.get("ignored_params") or ())
    chosen = _Chosen(model, over.size(), recipe, quantized_gather, dtype, options)
    if reshard is not False:
        chosen.given_back = {m for block in ([model] if reshard else blocks) for m in block.modules()}
    chosen.recompute = recompute
    chosen.wrap()
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh, **options)
    if chosen.scaled:
        model.register_forward_pre_hook(WeightScales(chosen.scaled, over, dtype).renew, prepend=True)
    if any(_may_be_delayed(layer, recipe) for layer in model.modules() if isinstance(layer, DelayedLayer)):
        renew_with(model, [mesh.get_group(dim) for dim in range(mesh.ndim)])
    _watch_gathers(model)
    if over.size() > 1 and chosen.placed:
        _gather_in_place([*blocks, model], chosen.placed)
    halves = dtype in (torch.bfloat16, torch.float16)
    # without a reduce_dtype FSDP2 reduces fp32 parameters' gradients in fp32 since PyTorch 2.15
    if over.size() > 1 and halves and policy.reduce_dtype in (torch.float32, None):  # type: ignore[union-attr]
        _exchange_gradients([*blocks, model], policy.reduce_dtype is not None, mesh.ndim == 1)  # type: ignore[union-attr]
    model.__dict__["_shard_receipt"] = ShardReceipt(tuple(chosen.rows), over.size())
    return model


def _may_be_delayed(layer: DelayedLayer, recipe: Recipe | None) -> bool:
    """Return whether a layer keeps amaxes to reduce, or an autocast may make it do so: the same on every rank."""
    if layer.recipe is not None:
        return bool(layer.delayed_slots())
    return recipe is None or recipe.delayed() or recipe.custom()


def _check_compiled(modules: list[nn.Module]) -> None:
    for module in modules:
        if traces_own_hooks(module):
            raise RuntimeError(
                f"a compiled {type(module).__name__} is to be sharded, and torch {torch.__version__} traces the hooks "
                "of compiled containers of torch.nn, which FSDP2 refuses; compile its forward instead: "
                "block.forward = torch.compile(block.forward, fullgraph=True)"
            )


def _checked_blocks(model: nn.Module, blocks: Any) -> list[nn.Module]:
    if not isinstance(blocks, Iterable):
        raise TypeError(f"blocks is {a_kind(blocks)}; pass a list of modules of the model")
    blocks, modules = list(blocks), set(model.modules())
    for block in blocks:
        if not isinstance(block, nn.Module) or block not in modules:
            raise ValueError(f"blocks holds {a_kind(block)} that is no part of the model; pass modules of it")
    return blocks


def _check_options(mesh: Any, quantized_gather: bool, options: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy, reshard = options.get("mp_policy"), options.get("reshard_after_forward")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is {shown(mesh)}; pass a DeviceMesh, as init_device_mesh makes it, or None for all ranks"
        )
    if mesh is not None and mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(
            f"mesh has {mesh.ndim} dims without names; make it with mesh_dim_names=('replicate', 'shard')"
        )
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy is {shown(policy)}; pass a torch.distributed.fsdp.MixedPrecisionPolicy")
    if quantized_gather and type(reshard) is int:
        raise ValueError(
            f"reshard_after_forward={reshard}: FSDP2 cannot reshard weights gathered quantized to fewer ranks; use "
            "True, False or quantized_gather=False"
        )


def _check_stored(model: nn.Module, ranks: int, ignored: Iterable[Any]) -> None:
    """Before anything is changed, what FSDP2 would find out in the middle of the model."""
    left = {id(parameter) for parameter in ignored}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor) and id(parameter) not in left:
            rows, rest = divmod(parameter.shape[0], ranks)
            try:
                parameter.check_rows(0 if rest else rows)
            except RuntimeError as error:
                raise RuntimeError(f"{name}: {error}") from None


class _Chosen:
    """The weights of a model, and which of them are gathered quantized."""

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        recipe: Recipe | None,
        wanted: bool,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.ranks, self.recipe, self.wanted, self.dtype = model, ranks, recipe, wanted, dtype
        self.ignored = {id(parameter) for parameter in options.get("ignored_params") or ()}
        self.placement = options.get("shard_placement_fn")
        self.uses = Counter(
            id(p) for m in model.modules() for p in own_parameters(m).values() if p is not None
        )
        self.read = _read_by_adapters(model)
        # modules whose weights are gathered for forward and backward apart
        self.given_back: set[nn.Module] = set()
        self.recompute = True
        self.rows: list[ShardedParameter] = []
        self.scaled: list[ScaledWeight] = []
        self.quantizers: dict[Any, Any] = {}  # quantizers of gathered tensors, by value
        self.placed: list[WeightGather] = []  # gathers whose codes always use the same memory

    def wrap(self) -> None:
        """Put shards that are gathered quantized in the place of the weights that can be."""
        stages = {
            (id(layer), name): (layer, stage)
            for layer in self.model.modules()
            if isinstance(layer, LinearLayer)
            for stage in layer._stages
            for name in layer._parts.get(stage.weight, [stage.weight])
        }
        for module_name, module in list(self.model.named_modules()):
            for name, parameter in list(own_parameters(module).items()):
                if parameter is None:
                    continue
                full = f"{module_name}.{name}" if module_name else name
                found, gather = stages.get((id(module), name)), None
                stored = isinstance(parameter, QuantizedTensor)  # FSDP2 gathers its codes
                reason = "" if stored or found is not None else "no weight of a low-precision GEMM"
                if found is not None and not stored:
                    reason = self._why_not(*found, parameter)
                    gather = None if reason else self._wrap(*found, name, parameter)
                kind = self.dtype if self.dtype and parameter.is_floating_point() else parameter.dtype
                plain, shape = parameter.numel() * kind.itemsize, tuple(parameter.shape)
                moved = plain if gather is None else gather.bytes(shape)
                moved = parameter.gathered_bytes() if stored else moved
                self.rows.append(ShardedParameter(full, shape, reason, moved, plain))

    def _why_not(self, layer: LinearLayer, stage: Stage, parameter: Any) -> str:
        """Return the obstacle to gathering a weight quantized, "" for none."""
        recipe = layer.recipe or self.recipe
        if not self.wanted:
            return "quantized_gather=False"
        if stage.weight in layer._parts and not isinstance(layer, GroupedLinearLayer):
            return "a part of a weight"
        if recipe is None:
            return "its layer has no recipe"
        if describe_tensor(parameter).mesh is not None:
            return "a DTensor already"
        if not layer.takes_codes():
            return "its layer transposes the weight"
        if self.uses[id(parameter)] > 1:
            return "tied to another parameter"
        if id(parameter) in self.ignored:
            return "in ignored_params"
        if layer in self.read:
            return "its adapter reads the weight in every forward"
        if layer._parallel is not None or getattr(getattr(layer, "parallel", None), "mode", None) is not None:
            return "its layer is split over tensor-parallel ranks"
        plan = linear_plan(recipe, stage.name, True, True, module_type=layer._module_type)
        if not plan.quantized:
            return "its layer runs in high precision"
        if plan.backward_override is not None:
            return "its backward reads the weight in high precision"
        if plan.eager_only:
            return "its quantizer is no value"
        return self._why_not_in_shards(layer, plan, parameter)

    def _why_not_in_shards(self, layer: LinearLayer, plan: LinearPlan, parameter: Tensor) -> str:
        quantizer: Any = plan.weight.quantizer
        tile = _tile(quantizer)
        if tile is None and quantizer._format_layout().native == "tensor":
            return "its quantizer has numerics of its own"
        if tile is None:
            return "its format quantizes rows and columns differently: two copies, as many bytes as in bf16"
        if (
            tile == 1
            and isinstance(layer, GroupedLinearLayer)
            and parameter.dim() == 2
            and layer.num_gemms == 1
        ):
            return "its format quantizes rows and columns differently, and it is the only group"
        if tile == 1 and isinstance(
            layer, FusibleOperation
        ):  # whose forward nothing can watch for running again
            return "its format quantizes rows and columns differently, and it is an operation"
        if tile == 1 and (self.recompute or layer not in self.given_back):
            return (
                "its format quantizes rows and columns differently: gathered by direction with recompute=False, in a "
                "block that reshards after its forward"
            )
        if tile == 1 and parameter.shape[-1] % MX_BLOCK:
            return f"its {parameter.shape[-1]} columns are not whole blocks of {MX_BLOCK}"
        if self.placement is not None:
            placement = self.placement(parameter)
            if placement is not None and getattr(placement, "dim", None) != 0:
                return "not sharded by rows"
        rows = parameter.shape[-2]
        if parameter.dim() == 3 and isinstance(quantizer, NVFP4Quantizer):
            return "its format keeps groups in one buffer: use single_grouped_weight=False"
        if parameter.dim() == 3:
            return self._why_not_in_groups(tile, parameter.shape[0], rows)
        if rows % (self.ranks * (_TILE if tile else 1)):
            whole = f" of whole {_TILE}-row tiles" if tile else ""
            return f"its {rows} rows are not {self.ranks} equal shards{whole}"
        return ""

    def _why_not_in_groups(self, tile: int, groups: int, rows: int) -> str:
        if groups % self.ranks:
            return f"its {groups} groups are not {self.ranks} equal shards"
        return f"its {rows} rows per group are not whole {_TILE}-row tiles" if tile and rows % _TILE else ""

    def _wrap(self, layer: LinearLayer, stage: Stage, name: str, parameter: Any) -> WeightGather:
        recipe: Any = layer.recipe or self.recipe
        described: Any = weight_quantizer(recipe, stage.name, layer._module_type)
        tile, rowwise = _tile(described), described.with_usage(rowwise=True, columnwise=False)
        members = parameter.shape[0] if parameter.dim() == 3 else 0
        if tile == 1:
            both = described.with_usage(rowwise=True, columnwise=True)
            backward = described.with_usage(rowwise=False, columnwise=True)
            gather = WeightGather(rowwise, both, False, backward, members)
            layer.register_forward_pre_hook(_NotAgain(gather))
        elif tile == 0 and not members:
            encoder = DelayedFloat8Quantizer(described.dtype, 0, columnwise=False)
            gather = WeightGather(encoder, rowwise, True)
        elif tile == NVFP4_BLOCK:
            gather = WeightGather(rowwise.replace(with_amax_reduction=True), rowwise, True)
        else:
            gather = WeightGather(rowwise, rowwise, False, members=members)
        # equal quantizers become one object: compiled blocks compare them before every run, and identity is quickest
        gather.quantizer = self.quantizers.setdefault(gather.quantizer, gather.quantizer)
        if tile != 1:
            self.placed.append(gather)
        if gather.per_tensor:
            self.scaled.append(ScaledWeight(layer, name, gather))
        sharded = nn.Parameter(ShardedWeight(parameter.detach(), gather), parameter.requires_grad)
        vars(sharded).update(vars(parameter))  # type: ignore[attr-defined]
        setattr(layer, name, sharded)
        # the backward transposes what was gathered, where it has the columns' scales
        gather.makes_columns = not layer._takes_rows(gather.quantizer._storage_name)
        layer.register_state_dict_post_hook(_SavePlain(name))
        layer.register_load_state_dict_pre_hook(_Rewrap(name, gather))
        return gather


def _read_by_adapters(model: nn.Module) -> set[Any]:
    """Return the layers whose adapters compute with the weight itself: DoRA of PEFT, and ``nc.train_merged``."""
    return {
        own_children(adapter).get("base_layer")
        for adapter in model.modules()
        if getattr(adapter, "lora_variant", None) or getattr(adapter, "trains_merged", False)
    }


def _tile(quantizer: Any) -> int | None:
    """Return how the scales of a weight lie: 0: one for all of it; 1: apart for rows and columns; else square tiles of
    so many
    rows, the same codes both ways. None: in a way that is not gathered."""
    native = quantizer._format_layout().native
    if native == "tensor":
        return 0 if type(quantizer) in _PER_TENSOR else None
    if native == "128x128":
        return _TILE
    if type(quantizer) is MXFP8Quantizer:
        return MX_BLOCK if quantizer.with_2d_quantization else 1
    if type(quantizer) is NVFP4Quantizer and quantizer.with_2d_quantization:
        apart = quantizer.nvfp4_use_4over6 or quantizer.stochastic_rounding
        return None if apart else NVFP4_BLOCK
    return None


def _gather_in_place(modules: list[Any], gathers: list[WeightGather]) -> None:
    """Make FSDP2 gather codes directly into the layers' buffers; the model comes last."""
    from .gather_in_place import GatherInPlace

    in_place, model = GatherInPlace(), modules[-1]
    for module in modules:
        module.set_custom_all_gather(in_place)
    for gather in gathers:
        gather.in_place = in_place

    def begin(model: nn.Module, args: Any) -> None:
        if starts_a_step():
            in_place.begin(next(model.parameters()).device)

    model.register_forward_pre_hook(begin, prepend=True)


def _exchange_gradients(modules: list[Any], dtype_stated: bool, reduces_once: bool) -> None:
    """Make FSDP2 reduce gradients by an exchange; the model comes last.

    Args:
        reduces_once: nothing reduces the sums of these ranks over others.
    """
    from .gradient_exchange import GradientExchange

    exchange, model = GradientExchange(dtype_stated), modules[-1]
    for module in modules:
        module.set_custom_reduce_scatter(exchange)
    groups = parameter_groups(model)

    def begin(model: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and starts_a_step():
            exchange.begin(synchronizes(model), _dtype_of_sums(groups) if reduces_once else None)

    model.register_forward_pre_hook(begin)


def _dtype_of_sums(groups: list[Any]) -> torch.dtype | None:
    """Return the dtype of all gradients that FSDP2 keeps; None if it keeps several, or a hook reads the sums."""
    found = {dtype for group in groups for dtype in gradient_dtypes(group)}
    dtype = found.pop() if len(found) == 1 else None
    if dtype not in HIGH_PRECISION or any(map(has_reduction_hook, groups)):
        return None
    return dtype


def _watch_gathers(model: nn.Module) -> None:
    """Make forwards record what the backward of weights gathered quantized needs."""
    gathers = [(group, _gathers_of(group)) for group in parameter_groups(model)]
    model.register_forward_pre_hook(functools.partial(_keep_codes, gathers), prepend=True)
    if any(found for _, found in gathers):
        every = [one for _, found in gathers for one in found]
        model.register_forward_pre_hook(functools.partial(_gather_anew, every), prepend=True)
    groups = [group for group, found in gathers if any(one.backward_encoder is not None for one in found)]
    if groups:
        model.register_forward_pre_hook(functools.partial(_check_given_back, groups), prepend=True)


def _gathers_of(group: Any) -> list[WeightGather]:
    """Return how weights are gathered quantized that FSDP2 gathers together."""
    return [own._gather for own in sharded_parts(group) if isinstance(own, ShardedWeight)]


def _gather_anew(gathers: list[WeightGather], model: nn.Module, args: Any) -> None:
    """Compute the forward pre-hook: give back what is still gathered of an earlier forward, and is not what this one
    would gather.

    Weights were written since.
    """
    if not starts_a_step():
        return
    if any(gather.written for gather in gathers):
        reshard(model)
    for gather in gathers:
        if not gather.per_tensor:  # WeightScales notes the others
            gather.written = False


def _keep_codes(groups: list[tuple[Any, list[WeightGather]]], model: nn.Module, args: Any) -> None:
    """Quantize shards once for a forward and its backward's gather; a forward pre-hook."""
    if starts_a_step():
        for group, gathers in groups:
            keeps = torch.is_grad_enabled() and gathers_in_backward(group)
            for gather in gathers:
                gather.keeps = keeps and gather.backward_encoder is None
                if torch.is_grad_enabled():  # others leave what an earlier forward keeps for its backward
                    gather.given = None


def _check_given_back(groups: list[Any], model: nn.Module, args: Any) -> None:
    """Compute the forward pre-hook, where weights are gathered by direction.

    Raises:
        RuntimeError: a weight that was gathered for the forward would still be there in the backward, or the reverse.
    """
    for group in groups:
        if not gathers_in_backward(group) or keeps_after_backward(group):
            raise RuntimeError(
                "shard was given recompute=False, so that weights are gathered by direction, and they now stay "
                "gathered after a forward or a backward: undo set_reshard_after_forward(False), "
                "set_reshard_after_backward(False), or shard with recompute=True"
            )


class _NotAgain:
    """Forward pre-hook of a layer whose weight is gathered by direction; compiled code goes past it."""

    def __init__(self, gather: WeightGather) -> None:
        self.gather = gather

    def __call__(self, layer: nn.Module, args: Any) -> None:
        if can_check() and self.gather.columns_arrived:
            raise RuntimeError(
                f"{a_kind(layer)} runs forward in the backward, where its weight is gathered column-wise; "
                "give shard recompute=True"
            )


class _SavePlain:
    """State-dict hook: a checkpoint holds ordinary tensors, which share memory with the parameter."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        value = state_dict.get(prefix + self.name)
        if how_stored(value) == "master":
            record = describe_tensor(value)
            state_dict[prefix + self.name] = record.spread(record.values())


class _Rewrap:
    """State-dict hook: what takes the place of a parameter (``assign=True``) is gathered like it."""

    def __init__(self, name: str, gather: WeightGather) -> None:
        self.name, self.gather = name, gather

    def __call__(self, layer: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        value: Any = state_dict.get(prefix + self.name)
        assigned = metadata.get("assign_to_params_buffers", False)
        if not assigned or value is None or how_stored(value) == "master":
            return
        record = describe_tensor(value)
        if record.mesh is not None:
            own = ShardedWeight(record.held.detach(), self.gather)
            state_dict[prefix + self.name] = record.spread(own)
