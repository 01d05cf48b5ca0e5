"""FSDP2 and DTensor: what sharding reads of them beyond ``fully_shard`` and its two hooks around an all-gather.

This file does not import ``torch.distributed.fsdp``: sharding code already has.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .private import Entry, UpstreamError, entry, private

_FSDP = "torch.distributed.fsdp"
_PARAMETER = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py"
_GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"

# -- a DTensor's part --------------------------------------------------------------------------------------------------

_LOCAL = entry(
    "torch.distributed.tensor.DTensor._local_tensor",
    follows="torch/distributed/tensor/_api.py",
    without="to_local() returns a copy that writes do not reach; train on one rank or on a tested release",
)


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, by an attribute that its documentation names."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Any) -> Any:
    """Return the very tensor that this rank holds of a DTensor, without gradients.

    Raises:
        UpstreamError: this release keeps it elsewhere.
    """
    try:
        return tensor._local_tensor
    except AttributeError:
        raise _LOCAL.error() from None


def replace_local_part(tensor: Any, local: Tensor) -> None:
    """Put another tensor of the same shape in the place of what this rank holds.

    Raises:
        UpstreamError: this release keeps it elsewhere.
    """
    if not hasattr(tensor, "_local_tensor"):
        raise _LOCAL.error()
    tensor._local_tensor = local


# -- what FSDP2 gathers and reduces together ---------------------------------------------------------------------------

_STATE = entry(
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    follows="torch/distributed/fsdp/_fully_shard/_fully_shard.py",
    without="use torch.distributed.fsdp.fully_shard in place of narrowcast.distributed.shard",
)
_ATTRIBUTES = {
    name: entry(
        f"FSDPParamGroup.{name}",
        follows=_GROUP,
        without="use torch.distributed.fsdp.fully_shard in place of narrowcast.distributed.shard",
    )
    for name in (
        "fsdp_params",
        "reduce_grads",
        "mesh_info",
        "post_forward_mesh_info",
        "reshard_after_backward",
        "_all_reduce_hook",
    )
}
_SHARDED_PARAMETER = entry(
    "FSDPParam.sharded_param",
    follows=_PARAMETER,
    without="use torch.distributed.fsdp.fully_shard in place of narrowcast.distributed.shard",
)


def reshard(model: nn.Module) -> None:
    """Give back what FSDP2 has gathered of a model, of all modules; its parameters are then the sharded ones.

    Raises:
        UpstreamError: this release keeps parameter groups elsewhere.
    """
    if _FSDP in sys.modules:
        for module in model.modules():
            if isinstance(module, sys.modules[_FSDP].FSDPModule):
                # After a forward that raised, FSDP2 gives back only what it does not keep behind a forward.
                kept = [(group, _read(group, "post_forward_mesh_info")) for group in _groups_of(module)]
                for group, _ in kept:
                    group.post_forward_mesh_info = _read(group, "mesh_info")
                module.reshard()  # type: ignore[attr-defined]
                for group, behind in kept:
                    group.post_forward_mesh_info = behind


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard`` made it one of its own."""
    cls = type(module)
    sharded = _FSDP in sys.modules and isinstance(module, sys.modules[_FSDP].FSDPModule)
    return next(one for one in cls.__bases__ if issubclass(one, nn.Module)) if sharded else cls


def _groups_of(module: Any) -> list[Any]:
    try:
        state: Any = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            found = state._fsdp_param_groups
        else:  # PyTorch before 2.12 has one
            found = [state._fsdp_param_group]
    except AttributeError as error:
        raise _STATE.error(str(error)) from None
    return [group for group in found if group is not None]


def parameter_groups(model: nn.Module) -> list[Any]:
    """Return the parameter groups that FSDP2 gathers together, of all modules.

    Raises:
        UpstreamError: this release keeps them elsewhere.
    """
    from torch.distributed.fsdp import FSDPModule

    return [g for module in model.modules() if isinstance(module, FSDPModule) for g in _groups_of(module)]


def _read(group: Any, name: str) -> Any:
    try:
        return getattr(group, name)
    except AttributeError as error:
        raise _ATTRIBUTES[name].error(str(error)) from None


def reduces_gradients(group: Any) -> bool:
    """Return whether the backward of this forward reduces gradients over ranks."""
    return _read(group, "reduce_grads")


def gathers_in_backward(group: Any) -> bool:
    """Return whether weights are given back after a forward, so that the backward gathers them again."""
    return _read(group, "post_forward_mesh_info") is not None


def keeps_after_backward(group: Any) -> bool:
    """Return whether weights stay gathered after a backward."""
    return not _read(group, "reshard_after_backward")


def has_reduction_hook(group: Any) -> bool:
    """Return whether ``set_all_reduce_hook`` was called, whose hook reads the sums of gradients."""
    return _read(group, "_all_reduce_hook") is not None


def sharded_parts(group: Any) -> list[Any]:
    """Return this rank's shards of a group's parameters."""
    try:
        return [local_part(one.sharded_param) for one in _read(group, "fsdp_params")]
    except AttributeError as error:
        raise _SHARDED_PARAMETER.error(str(error)) from None


def sharded_parameters(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return FSDP2's sharded parameter of each of its modules and names, also while the modules have the gathered ones.

    Raises:
        UpstreamError: this release keeps them elsewhere.
    """
    if _FSDP not in sys.modules:  # nothing is sharded
        return {}
    found = {}
    for one in (one for group in parameter_groups(model) for one in _read(group, "fsdp_params")):
        try:
            info, sharded = one._module_info, one.sharded_param
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
        except AttributeError as error:
            raise _SHARDED_PARAMETER.error(str(error)) from None
        found.update(dict.fromkeys(owners, sharded))
    return found


def gradient_dtypes(group: Any) -> set[torch.dtype | None]:
    """Return the dtypes of the gradients that FSDP2 keeps of a group's shards."""
    try:
        shards = [one.sharded_param for one in _read(group, "fsdp_params")]
    except AttributeError as error:
        raise _SHARDED_PARAMETER.error(str(error)) from None
    return {one.grad_dtype for one in shards if one.requires_grad}


_POLICY = entry(
    "FSDPParam.mp_policy",
    follows=_PARAMETER,
    without="serve from a model in one dtype, without MixedPrecisionPolicy(param_dtype=...)",
)


def compute_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtype that FSDP2 casts parameters to for their forward, by the id of this rank's shard.

    Raises:
        UpstreamError: this release keeps it elsewhere.
    """
    if _FSDP not in sys.modules:  # nothing is sharded
        return {}
    found = {}
    for group in parameter_groups(model):
        for one, part in zip(_read(group, "fsdp_params"), sharded_parts(group)):
            if not hasattr(one, "mp_policy"):
                raise _POLICY.error()
            if one.mp_policy.param_dtype is not None:
                found[id(part)] = one.mp_policy.param_dtype
    return found


# -- the buffers that FSDP2 sends --------------------------------------------------------------------------------------

_COLLECTIVES = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
_WITHOUT_OPERATORS = (
    "shard with quantized_gather=False, and with a MixedPrecisionPolicy whose reduce_dtype is its param_dtype"
)
BUFFER_OPERATORS = {
    "fsdp::chunk_cat": "put gradients in",  # until 2.14
    "fsdp::chunk_cat_mixed_dtype": "put gradients in",  # from 2.15
    "fsdp::all_gather_copy_in": "put shards in",
    "fsdp::split_with_sizes_copy": "take weights out",
}
"""FSDP2's own operators on the buffers that it sends, by name, with what each does."""

for _name in BUFFER_OPERATORS:
    entry(
        f"torch.ops.{_name.replace('::', '.')}",
        follows=_COLLECTIVES,
        without=_WITHOUT_OPERATORS,
        tried="2.15-" if _name.endswith("mixed_dtype") else "",
    )


def unknown_operator(func: Any) -> UpstreamError:
    """Return the error for an operator on FSDP2's buffers that no tested release applies."""
    return Entry("operators of FSDP2's buffers", follows=_COLLECTIVES, without=_WITHOUT_OPERATORS).error(
        f"{func} of a buffer that tensors are sent without"
    )


def _cat_padded_chunks(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> Tensor:
    rows = []
    for one in tensors:
        missing = -one.shape[0] % num_chunks
        padded = F.pad(one, (0, 0) * (one.dim() - 1) + (0, missing)) if missing else one
        rows.append(padded.reshape(num_chunks, -1).to(out.dtype))
    return torch.cat(rows, 1, out=out)


cat_chunks: Any = private(
    "torch._chunk_cat",
    follows="ATen, as torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py calls it",
    without="tensors are padded and concatenated one by one, with the same result",
    fallback=_cat_padded_chunks,
)
"""``(tensors, 0, ranks, out=)``: a row for each rank, of every tensor's chunk for it, padded with zeros."""

# -- sharding in progress ----------------------------------------------------------------------------------------------

_CALLERS = entry(
    "frames of torch.distributed.fsdp.fully_shard",
    follows=_PARAMETER,
    without="build the model without quantized_model_init and shard that",
)
_SHARDING = entry(
    "FSDPParam._module_info and .mesh_info",
    follows=_PARAMETER,
    without="build the model without quantized_model_init and shard that",
)
_MODULE_CALL = nn.Module.__call__.__code__
_SHARDS = {
    _FSDP: ("fully_shard",),
    "torch.distributed._composable.replicate_with_fsdp": ("replicate",),
}


class Sharding(NamedTuple):
    """FSDP2's sharding of a parameter: number of ranks, their group, and further modules that share it."""

    ranks: int
    group: Any
    shared_modules: list[nn.Module]


def sharding_caller() -> str:
    """Return "FSDP1" or "FSDP2" when one of them is sharding and calls this, else "".

    The public functions that shard are looked for among the callers, by their code, up to a module's forward: what runs
    inside a forward is not FSDP's work. So nothing depends on where PyTorch keeps its files.

    Raises:
        UpstreamError: another part of torch.distributed.fsdp calls this, outside the functions that are known.
    """
    if _FSDP not in sys.modules:
        return ""
    shards, flattens = _sharding_code(tuple(map(sys.modules.get, _SHARDS)))
    inside = False
    for frame in _callers():
        if frame.f_code in shards:
            return "FSDP2"
        if frame.f_code in flattens:
            return "FSDP1"
        inside |= frame.f_globals.get("__name__", "").startswith(_FSDP)
    if inside:
        raise _CALLERS.error("another function of torch.distributed.fsdp that splits a quantized tensor")
    return ""


def _sharding_code(modules: tuple[Any, ...]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the code of the functions that shard, and of those of FSDP1."""
    functions = [
        getattr(module, name)
        for module, names in zip(modules, _SHARDS.values())
        for name in names
        if module is not None
    ]
    shards = frozenset(inspect.unwrap(function).__code__ for function in functions)
    return shards, frozenset([modules[0].FullyShardedDataParallel.__init__.__code__])


def current_sharding() -> Sharding:
    """Return how FSDP2 shards the parameter at hand, which its callers hold.

    Raises:
        UpstreamError: no caller holds it in the form that is known.
    """
    for frame in _callers():
        parameter = frame.f_locals.get("self")
        if not hasattr(parameter, "_module_info"):
            continue
        try:
            shared, mesh = parameter._module_info.shared_modules, parameter.mesh_info
        except AttributeError as error:
            raise _SHARDING.error(str(error)) from None
        if hasattr(mesh, "shard_mesh_size") and hasattr(mesh, "shard_process_group"):
            return Sharding(mesh.shard_mesh_size, mesh.shard_process_group, shared)
        if hasattr(mesh, "replicate_mesh_size"):  # replicas alone have no shards
            return Sharding(1, None, shared)
        raise _SHARDING.error(f"a {type(mesh).__name__} without shard_mesh_size")
    raise _SHARDING.error("no caller that holds it")


def _callers() -> Iterator[Any]:
    """Yield the frames of the callers, up to a module's forward."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _MODULE_CALL:
        yield frame
        frame = frame.f_back


# -- modules whose parameters FSDP writes ------------------------------------------------------------------------------

_MANAGED = entry(
    "nn.Module._is_fsdp_managed_module",
    follows="torch/_dynamo/variables/builder.py, which reads it, too",
    without="call layers without is_first_microbatch",
)


def is_managed(module: nn.Module) -> bool:
    """Return whether FSDP writes a module's parameters, which does not raise their versions.

    Raises:
        UpstreamError: FSDP2 of this release marks such modules in another way.
    """
    if getattr(module, "_is_fsdp_managed_module", False):
        return True
    if not torch.compiler.is_compiling() and _FSDP in sys.modules and not _marks_modules():
        raise _MANAGED.error()
    return False


def _marks_modules() -> bool:
    """Return whether ``fully_shard`` sets the mark."""
    return "_is_fsdp_managed_module" in inspect.unwrap(sys.modules[_FSDP].fully_shard).__code__.co_names


# -- tensor-parallel styles --------------------------------------------------------------------------------------------

_STYLES = entry(
    "frames of torch.distributed.tensor.parallel's styles",
    follows="torch/distributed/tensor/parallel/style.py",
    without="use the styles of narrowcast.distributed, such as narrowcast.distributed.ColwiseParallel",
)
_PARALLEL = "torch.distributed.tensor.parallel"


def placed_by_style(parameter: Any) -> bool:
    """Return whether one of PyTorch's styles for ``parallelize_module`` registers this parameter.

    A caller is looked for that is a method of one of its public classes.

    Raises:
        UpstreamError: another part of torch.distributed.tensor.parallel registers it.
    """
    if not is_distributed(parameter) or _PARALLEL not in sys.modules:
        return False
    parallel: Any = sys.modules[_PARALLEL]
    styles = (parallel.ColwiseParallel, parallel.RowwiseParallel, parallel.SequenceParallel)
    frame: Any = sys._getframe(1)
    inside = False
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), styles):
            return True
        inside |= frame.f_globals.get("__name__", "").startswith(_PARALLEL)
        frame = frame.f_back
    if inside:
        raise _STYLES.error("a function that registers a DTensor")
    return False
