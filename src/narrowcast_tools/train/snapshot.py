"""A run's state as plain tensors, and back: parameters, buffers, optimizer moments, random generators."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.optimizers import FusedAdam

from .checkpoint import DamagedCheckpoint, TensorFiles

MODEL = "model"
TRAINING = "training"
OPTIMIZER = "optimizer"
CPU_GENERATOR = "generator.cpu"
CUDA_GENERATOR = "generator.cuda.0"


def take(model: nn.Module, optimizer: Optimizer) -> TensorFiles:
    """Collect everything that a run needs to go on bit for bit.

    Args:
        model: its parameters and persistent buffers (delayed scaling keeps scales and amax history there).
        optimizer: its per-parameter state; hyperparameters follow from the settings.

    Returns:
        two groups of tensors: `model`, loadable elsewhere, and `training`, with optimizer and generators.
    """
    training = {
        _of(name, key): _value(optimizer, parameter, key)
        for name, parameter in model.named_parameters()
        for key in optimizer.state[parameter]
    }
    state = model.state_dict()
    return {MODEL: {name: state[name] for name in _shapes(model)}, TRAINING: training | _generators()}


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
    moments, generators = _taken_apart(files[TRAINING], model)
    restore_model(files[MODEL], model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    listed = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: moments[name] for index, name in enumerate(listed)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if isinstance(optimizer, FusedAdam):
        optimizer.write_weight_codes()  # so that a compiled model finds them
    _set_generators(generators)


def _value(optimizer: Optimizer, parameter: Tensor, kind: str) -> Tensor:
    """Return a parameter's state in the optimizer: of `FusedAdam` the values, whatever keeps them."""
    fused = isinstance(optimizer, FusedAdam)
    value: Tensor = (
        optimizer.get_unscaled_state(parameter, kind) if fused else optimizer.state[parameter][kind]
    )
    return value if value.ndim else value.clone()  # parameters may share the count of their steps


def _generators() -> dict[str, Tensor]:
    """Return the generators of the CPU and of this process's GPU."""
    states = {CPU_GENERATOR: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[CUDA_GENERATOR] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states[CPU_GENERATOR])
    state = states.get(CUDA_GENERATOR)
    if state is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state)


def _taken_apart(
    training: dict[str, Tensor], model: nn.Module
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the optimizer's state by parameter and kind, all of it there, and the generators."""
    generators = {name: value for name, value in training.items() if name.startswith("generator.")}
    state = {name: value for name, value in training.items() if name not in generators}
    parameters = dict(model.named_parameters())
    kinds = {name.rpartition(".")[2] for name in state}
    shapes = {_of(name, kind): p.shape for name, p in parameters.items() for kind in kinds}
    _require_shapes(shapes, state, scalars=True)  # counters of the optimizer
    return {name: {kind: state[_of(name, kind)] for kind in kinds} for name in parameters}, generators


def _of(parameter: str, kind: str) -> str:
    """Return the name of a parameter's state in the optimizer."""
    return f"{OPTIMIZER}.{parameter}.{kind}"


def restore_model(tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Put the `model` group of a checkpoint into a freshly built model.

    Raises:
        DamagedCheckpoint: tensors are missing, left over or of another shape.
    """
    _require_shapes(_shapes(model), tensors)
    model.load_state_dict(tensors, strict=False)  # strict would ask for the other names of tied ones


def take_shards(model: nn.Module, optimizer: Optimizer, orders: dict[str, Tensor]) -> TensorFiles:
    """Collect what `take` does of a model whose parameters are sharded, whole; every rank calls it.

    Args:
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
        _of(name, key): _in_order(value, backwards.get(name))
        for name, values in moments["state"].items()
        for key, value in values.items()
    }
    tensors = {name: _in_order(state[name], backwards.get(name)) for name in _shapes(model)}
    return {MODEL: tensors, TRAINING: training | _generators()}


def restore_shards(
    files: TensorFiles, model: nn.Module, optimizer: Optimizer, orders: dict[str, Tensor]
) -> None:
    """Put this rank's part of collected state into a model and its optimizer; every rank calls it.

    Raises:
        DamagedCheckpoint, KeyError: as `restore`.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    tensors = files[MODEL]
    _require_shapes(_shapes(model), tensors)
    moments, generators = _taken_apart(files[TRAINING], model)
    for name in moments.keys() & orders.keys():
        moments[name] = {kind: _in_order(value, orders[name]) for kind, value in moments[name].items()}
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
    """Return the tensors of a checkpoint, of tied ones under their first name."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    return {name: value.shape for name, value in model.state_dict().items() if name not in tied}


def _require_shapes(
    shapes: dict[str, torch.Size], tensors: dict[str, Tensor], *, scalars: bool = False
) -> None:
    if different := sorted(shapes.keys() ^ tensors.keys()):
        raise DamagedCheckpoint(f"tensors missing or left over: {', '.join(different)}")
    for name, shape in shapes.items():
        found = tensors[name].shape
        if found != shape and (found or not scalars):
            raise DamagedCheckpoint(f"{name} is of shape {tuple(found)}, not {tuple(shape)}")
