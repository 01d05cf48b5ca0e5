"""Checkpoints of sharded models, in the format of PyTorch: a save leaves the old one whole until the new one is."""

from __future__ import annotations

import io
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _checks
from ..layers import DelayedLayer
from ..tensors import QuantizedTensor
from ..upstream.modules import own_buffers


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    extra: dict[str, Any] | None = None,
    group: Any = None,
    asynchronous: bool = False,
) -> Future[None]:
    """Save model, optimizer and delayed scaling with ``torch.distributed.checkpoint``; every rank calls it.

    Weights are ordinary high-precision tensors, sharded like the parameters. Any number of ranks can load them, also
    one process without process groups. Files are written beside ``path`` and replace it once all ranks are done; a rank
    that dies leaves the old checkpoint.

    Args:
        path: a folder on a file system that all ranks see.
        extra: other values, such as the number of steps, the same on every rank: numbers, strings, bytes, None,
            tensors, and nested dicts, lists and tuples of them. Loading returns it unchanged.
        group: a process group for the save; with ``asynchronous`` its own "gloo" group, which training does not use.
        asynchronous: return once all values are copied to the CPU.
    Returns:
        An object whose ``result()`` waits until ``path`` holds the new checkpoint.
    Raises:
        ValueError: ``asynchronous`` lacks ``group`` with several ranks, or only unpickling could read a value of
            ``extra``.
        CheckpointException: PyTorch's error, on the other ranks; with ``asynchronous`` from ``result()``.
    """
    import torch.distributed.checkpoint as dcp

    _checks.path("path", path)
    _checks.module("model", model)
    _checks.optimizer("optimizer", optimizer)
    _checks.flags(asynchronous=asynchronous)
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra is {extra!r}, of type {type(extra).__name__}; pass a dict or None")
    several = _ranks(group) > 1
    if asynchronous and several and group is None:
        raise ValueError(
            "asynchronous=True needs group=torch.distributed.new_group(backend='gloo'), made once: its collectives "
            "would meet those of the training"
        )
    target, state = Path(path), _state(model, optimizer, extra or {})
    writing = target.with_name(target.name + ".writing")
    if _is_first(group):
        shutil.rmtree(writing, ignore_errors=True)  # left by an interrupted save
    if several:
        torch.distributed.barrier(group)
    options: dict[str, Any] = {"checkpoint_id": writing, "process_group": group}
    done: Future[None] = Future()

    def finish(saved: Any = None) -> None:
        try:
            if saved is not None:
                saved.result()
            if _is_first(group):
                _replace(target, writing)
            if several:
                torch.distributed.barrier(group)
        except BaseException as error:  # CheckpointException is no Exception
            done.set_exception(error)
        else:
            done.set_result(None)

    if asynchronous and torch.distributed.is_initialized():
        dcp.async_save(state, **options).add_done_callback(finish)  # type: ignore[union-attr]
    else:
        dcp.save(state, **options, no_dist=not torch.distributed.is_initialized())
        finish()
        done.result()
    return done


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, group: Any = None
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_checkpoint`, written by any number of ranks; every rank calls it.

    Loading runs no code of the checkpoint; PyTorch's own reader unpickles (``checkpoint_reader.py``). Delayed-scaling
    state is restored even if a layer learns of its recipe only from an ``autocast``. A checkpoint without it, such as a
    bf16 run's, restarts it with a warning.

    Args:
        model: the saved model, sharded in any way or not at all.
        optimizer: None does not read its state.
    Returns:
        ``extra``.
    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: a file is damaged, or of another kind.
        CheckpointException: PyTorch's error, for example for a model of other shapes.
    """
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    from .checkpoint_reader import SafeReader, load

    _checks.path("path", path)
    _checks.module("model", model)
    _checks.optimizer("optimizer", optimizer)
    target = Path(path)
    if not (target / ".metadata").exists():  # killed between two renames
        target = target.with_name(target.name + ".old")
    if not (target / ".metadata").exists():
        raise FileNotFoundError(f"{path} holds no checkpoint; save one with save_checkpoint")
    reader = SafeReader(target)
    there = reader.read_metadata().state_dict_metadata
    _make_room(model, there)
    state = _state(model, optimizer, None)
    names = _delayed_names(model)
    state["model"] = {
        name: value for name, value in state["model"].items() if name not in names or f"model.{name}" in there
    }
    # earlier versions wrote an entry for each value of extra
    entries = {key[6:]: _empty(there[key]) for key in there if key.startswith("extra.")}
    packed = "extra" in there
    state["extra"] = b"" if packed else entries
    load(state, reader, group)
    extra = _unpacked(state["extra"]) if packed else entries
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return extra


def _state(model: nn.Module, optimizer: Any, extra: dict[str, Any] | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if extra is not None:
        state["extra"] = _packed(extra)
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _packed(extra: dict[str, Any]) -> bytes:
    """Return ``extra`` as one value: PyTorch would flatten nested dicts and lists and drop empty ones."""
    written = io.BytesIO()
    torch.save(_plain(extra, "extra"), written)
    return written.getvalue()


def _unpacked(value: Any) -> dict[str, Any]:
    from .checkpoint_reader import plain_value

    read = plain_value(io.BytesIO(value), "extra") if type(value) is bytes else None
    if not isinstance(read, dict):
        raise ValueError("extra of the checkpoint is not what save_checkpoint writes")
    return read


def _plain(value: Any, where: str) -> Any:
    """Return a copy of a value of ``extra`` that ``torch.load(weights_only=True)`` reads."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if type(value) in (dict, list, tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        plain = {_plain(key, where): _plain(one, f"{where}[{key!r}]") for key, one in pairs}
        return plain if isinstance(value, dict) else type(value)(plain.values())
    if isinstance(value, torch.Tensor):
        value = getattr(value, "full_tensor", lambda: value)().detach()
        if not isinstance(value, QuantizedTensor):
            return value.as_subclass(torch.Tensor).to("cpu", copy=True).contiguous()
        return value.cpu()
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise ValueError(
        f"{where} is a {type(value).__name__}, which only unpickling could read; give numbers, strings, bytes, tensors "
        "and dicts, lists or tuples of them, such as torch.from_numpy(array) or str(path)"
    )


def _empty(described: Any) -> Any:
    """Return the destination of a value of the checkpoint."""
    size = getattr(described, "size", None)
    return 0 if size is None else torch.empty(size, dtype=described.properties.dtype)


def _layers(model: nn.Module) -> dict[str, DelayedLayer]:
    """Return layers with delayed state by their names in a checkpoint, in which wrappers leave no traces."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, DelayedLayer):
            for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
                name = name.replace(f"{wrapper}.", "").removesuffix(wrapper).rstrip(".")
            found[name] = layer
    return found


def _delayed_names(model: nn.Module) -> set[str]:
    return {
        f"{name}.{own}" if name else own
        for name, layer in _layers(model).items()
        for own in layer._state_names()
    }


@torch.no_grad()
def _make_room(model: nn.Module, there: dict[str, Any]) -> None:
    """Delayed state that is in a checkpoint, for layers that do not know of it yet."""
    for name, layer in _layers(model).items():
        for own in layer._state_names():
            described = there.get(f"model.{name}.{own}" if name else f"model.{own}")
            buffer = own_buffers(layer)[own]
            if described is not None and (buffer is None or buffer.shape != described.size):
                device = next(layer.parameters()).device
                own_buffers(layer)[own] = torch.zeros(described.size, dtype=torch.float32, device=device)


def _replace(target: Path, written: Path) -> None:
    """Put a written folder in the place of another, which until then is there, or beside it as ``.old``."""
    old = target.with_name(target.name + ".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    written.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _ranks(group: Any) -> int:
    distributed = torch.distributed
    return distributed.get_world_size(group) if distributed.is_initialized() else 1


def _is_first(group: Any) -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank(group) == 0
