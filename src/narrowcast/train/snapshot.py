"""A run's state as plain tensors, and back: parameters, buffers, optimizer moments, random generators."""

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
    training[CPU_GENERATOR] = torch.get_rng_state()
    for index, state in enumerate(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []):
        training[f"{CUDA_GENERATOR}.{index}"] = state
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
    generator = training.pop(CPU_GENERATOR)
    generators = {name: training.pop(name) for name in [*training] if name.startswith(CUDA_GENERATOR)}
    _restore_optimizer(training, model, optimizer)
    restore_model(files[MODEL], model)
    torch.set_rng_state(generator)
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if (state := generators.get(f"{CUDA_GENERATOR}.{index}")) is not None:
            torch.cuda.set_rng_state(state, index)


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
