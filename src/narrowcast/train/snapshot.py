"""A run's state as plain tensors, and back: parameters, buffers, optimizer moments, random generators."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .checkpoint import DamagedCheckpoint, TensorFiles

MODEL = "model"
TRAINING = "training"
OPTIMIZER = "optimizer"
CPU_GENERATOR = "generator.cpu"
CUDA_GENERATOR = "generator.cuda"


def take(model: nn.Module, optimizer: Optimizer) -> TensorFiles:
    """Collect everything that a run needs to go on bit for bit.

    Args:
        model: its parameters and persistent buffers (delayed scaling keeps scales and amax history there).
        optimizer: its per-parameter state; hyperparameters follow from the settings.

    Returns:
        two groups of tensors: `model`, loadable elsewhere, and `training`, with optimizer and generators.
    """
    training = {
        f"{OPTIMIZER}.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    training |= _generators()
    return {MODEL: _unshared(model.state_dict(keep_vars=True)), TRAINING: training}


def restore(files: TensorFiles, model: nn.Module, optimizer: Optimizer) -> None:
    """Put collected state into a freshly built model and optimizer, and into torch's generators.

    Args:
        files: what `take` returned, on the CPU.
        model: a model of the same configuration, on its device.
        optimizer: an optimizer of its parameters.

    Raises:
        DamagedCheckpoint: tensors are missing, left over or of another shape.
        KeyError: a whole group or the generator is missing.
    """
    training = dict(files[TRAINING])
    generators = {name: training.pop(name) for name in [*training] if name.startswith("generator.")}
    _restore_optimizer(training, model, optimizer)
    restore_model(files[MODEL], model)
    _set_generators(generators)


def _generators() -> dict[str, Tensor]:
    """The generators of the CPU and of this process's GPU."""
    states = {CPU_GENERATOR: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"{CUDA_GENERATOR}.0"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states[CPU_GENERATOR])
    state = states.get(f"{CUDA_GENERATOR}.0")
    if state is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state)


def _restore_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    left = dict(tensors)
    kinds = {name.rpartition(".")[2] for name in tensors}
    for name, parameter in model.named_parameters():
        for kind in kinds:
            value = left.pop(f"{OPTIMIZER}.{name}.{kind}", None)
            # A per-parameter counter is a scalar and stays where the optimizer put it; moments live with theirs.
            if value is None or value.shape not in (parameter.shape, torch.Size()):
                found = "missing" if value is None else f"of shape {tuple(value.shape)}"
                raise DamagedCheckpoint(f"the optimizer's {kind} of {name} is {found}")
            optimizer.state[parameter][kind] = value.to(parameter.device)
    if left:
        raise DamagedCheckpoint(f"tensors left over: {', '.join(sorted(left))}")


def restore_model(tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Put the `model` group of a checkpoint into a freshly built model.

    Raises:
        DamagedCheckpoint: tensors are missing, left over or of another shape.
    """
    try:
        result = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise DamagedCheckpoint(str(error).replace("\n", " ")) from error
    state = model.state_dict(keep_vars=True)
    absent = set(state) - set(_unshared(state))  # tied to a tensor that is there under its first name
    missing = set(result.missing_keys) - absent
    if missing or result.unexpected_keys:
        names = ", ".join([*sorted(missing), *result.unexpected_keys])
        raise DamagedCheckpoint(f"tensors missing or left over: {names}")


def _unshared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop further names of one tensor: safetensors stores each memory once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def take_shards(model: nn.Module, optimizer: Optimizer, orders: dict[str, Tensor]) -> TensorFiles:
    """Collect what `take` does of a model whose parameters are sharded, whole; every rank calls it.

    Args:
        model: its parameters and persistent buffers.
        optimizer: its per-parameter state.
        orders: the order that the rows of parameters are in, by name.

    Returns:
        as `take`, on the CPU, on the first rank; elsewhere nothing.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any
    moments: Any
    state, moments = get_state_dict(model, optimizer, options=options)
    if not state:
        return {}
    backwards = {name: order.argsort() for name, order in orders.items()}
    training = {
        f"{OPTIMIZER}.{name}.{key}": _in_order(value, backwards.get(name))
        for name, values in moments["state"].items()
        for key, value in values.items()
    }
    tensors = {name: _in_order(state[name], backwards.get(name)) for name in _shapes(model)}
    return {MODEL: tensors, TRAINING: training | _generators()}


def restore_shards(
    files: TensorFiles, model: nn.Module, optimizer: Optimizer, orders: dict[str, Tensor]
) -> None:
    """Put this rank's part of collected state into a model and its optimizer; every rank calls it.

    Args:
        files, model, optimizer: as `restore` takes them.
        orders: as `take_shards` takes them.

    Raises:
        DamagedCheckpoint, KeyError: as `restore`.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    training, tensors = dict(files[TRAINING]), files[MODEL]
    generators = {name: training.pop(name) for name in [*training] if name.startswith("generator.")}
    shapes = _shapes(model)
    _require_shapes(shapes, tensors)
    parameters = {name: shapes[name] for name, _ in model.named_parameters()}
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    kinds = {name.rpartition(".")[2] for name in training}
    _require_shapes(
        {f"{OPTIMIZER}.{name}.{kind}": shape for name, shape in parameters.items() for kind in kinds},
        training,
    )
    for name, value in training.items():
        owner, _, kind = name.removeprefix(f"{OPTIMIZER}.").rpartition(".")
        moments[owner][kind] = _in_order(value, orders.get(owner))
    # strict would ask for the other names of tied ones
    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    groups = dcp.get_optimizer_state_dict(model, optimizer)["param_groups"]
    given: Any = {name: _in_order(value, orders.get(name)) for name, value in tensors.items()}
    dcp.set_model_state_dict(model, given, options=options)
    whole: Any = {"state": moments, "param_groups": groups}
    dcp.set_optimizer_state_dict(model, optimizer, whole, options=options)
    _set_generators(generators)


def _in_order(value: Tensor, order: Tensor | None) -> Tensor:
    return value if order is None or not value.ndim else value[order]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The tensors of a checkpoint, of tied ones under their first name."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    return {name: value.shape for name, value in model.state_dict().items() if name not in tied}


def _require_shapes(shapes: dict[str, torch.Size], tensors: dict[str, Tensor]) -> None:
    if different := sorted(shapes.keys() ^ tensors.keys()):
        raise DamagedCheckpoint(f"tensors missing or left over: {', '.join(different)}")
    for name, shape in shapes.items():
        found = tensors[name].shape
        if found not in (shape, torch.Size()):  # a counter of the optimizer is a scalar
            raise DamagedCheckpoint(f"{name} is of shape {tuple(found)}, not {tuple(shape)}")
