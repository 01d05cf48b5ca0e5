"""Checkpoints of models on many ranks, in the format of PyTorch: a save leaves the old one whole until the new one is.

Every value is written under its name in the whole model, each rank's parts of it at their places, as the records of
:mod:`..layers.described` say. Ranks must agree on what several of them hold.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.serialization import get_crc32_options, set_crc32_options

from .. import _checks
from .._checks import a_kind, shown, typed
from ..layers import DelayedLayer, GroupedLinearLayer, names_apart, state_names
from ..layers.described import Experts, ParameterRecord, Place, describe_parameters, describe_tensor, places
from ..upstream.modules import is_saved, own_buffers
from .checkpoint_planner import LoadPlanner, Refused, SavePlanner, digest
from .checkpoint_reader import SafeReader, load, plain_value
from .together import Together

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


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

    Weights are ordinary high-precision tensors. Each rank writes its parts of DTensors, of layers with a ``tp_group``
    and of local experts. Any number of ranks can load them, also one process without process groups. Values that
    several ranks hold are compared by a checksum. Files are written beside ``path`` and replace it once all ranks are
    done; a rank that dies, or refuses, leaves the old checkpoint. Of runs that save into one folder, the last one's
    checkpoint stays whole.

    Args:
        path: a folder on a file system that all ranks see.
        extra: other values, such as the number of steps, the same on every rank: numbers, strings, bytes, None,
            tensors, and nested dicts, lists and tuples of them. Loading returns it unchanged.
        group: a process group for the save; with ``asynchronous`` its own "gloo" group, which training does not use.
        asynchronous: return once all values are copied to the CPU.
    Returns:
        An object whose ``result()`` waits until ``path`` holds the new checkpoint.
    Raises:
        ValueError: ``asynchronous`` lacks ``group`` with several ranks, only unpickling could read a value of
            ``extra``, it is not known how ranks share a parameter, or ranks hold different copies of a value; before a
            byte is written, on every rank.
        CheckpointException: PyTorch's error; with ``asynchronous`` from ``result()``, like that of different copies.
    """
    _checks.path("path", path)
    _checks.module("model", model)
    _checks.optimizer("optimizer", optimizer)
    _checks.flags(asynchronous=asynchronous)
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra is {typed(extra)}; pass a dict or None")
    together = Together.of(group)
    if asynchronous and len(together.ranks) > 1 and group is None:
        raise ValueError(
            "asynchronous=True needs group=torch.distributed.new_group(backend='gloo'), made once: its collectives "
            "would meet those of the training"
        )
    target = Path(path)
    with together.step() as groups:
        plain = _plain(extra or {}, "extra")
        state, records = _state(model, optimizer, plain)
        groups[together.own] = [
            _comparable(one) for one in state.get("optimizer", {}).get("param_groups", [])
        ]
    if len(together.ranks) > 1 and optimizer is not None:
        state["optimizer"]["param_groups"] = _joined(state["optimizer"]["param_groups"], groups)
    delayed = _names_of_state(model)
    broadcast = {name: first for name, first in _broadcast(model, records).items() if name not in delayed}
    planner = SavePlanner(records, len(together.ranks), broadcast, {"extra": digest(plain)}, delayed)
    with together.step() as folders, _checks.writing(target):
        made = _Writing(target) if together.first else None
        if made is not None:
            folders[together.own] = made.folder
    writing = folders[together.ranks[0]]
    options: dict[str, Any] = {"checkpoint_id": writing, "process_group": group, "planner": planner}
    done: Future[None] = Future()

    def finish(save: Callable[[], Any]) -> None:
        try:
            with together.step():
                with _refusals():
                    save()
                if made is not None:
                    _replace(target, writing)
                    made.end()
        except BaseException as error:  # CheckpointException is no Exception
            if made is not None:
                made.end()
            done.set_exception(error)
        else:
            done.set_result(None)

    if asynchronous and torch.distributed.is_initialized():
        dcp.async_save(state, **options).add_done_callback(lambda saved: finish(saved.result))  # type: ignore[union-attr]
    else:
        with _without_crc():
            finish(lambda: dcp.save(state, **options, no_dist=not torch.distributed.is_initialized()))
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
    _checks.path("path", path)
    _checks.module("model", model)
    _checks.optimizer("optimizer", optimizer)
    target, together = Path(path), Together.of(group)
    with together.step():
        if not (target / ".metadata").exists():  # killed between two renames
            target = target.with_name(target.name + ".old")
        if not (target / ".metadata").exists():
            raise FileNotFoundError(f"{path} holds no checkpoint; save one with save_checkpoint")
        reader = SafeReader(target)
        there = reader.read_metadata().state_dict_metadata
        delayed, old = _names_of_state(model), _old_names(model, there)
        _make_room(model, there)
        state, records = _state(model, optimizer, None)
    state["model"] = {
        name: value
        for name, value in state["model"].items()
        if name not in delayed or f"model.{name}" in there
    }
    state["model"].update({name: _empty(there[f"model.{name}"]) for name in old})
    # earlier versions wrote an entry for each value of extra
    entries = {key[6:]: _empty(there[key]) for key in there if key.startswith("extra.")}
    packed = "extra" in there
    state["extra"] = b"" if packed else entries
    parts = ("model.",) if optimizer is None else ("model.", "optimizer.state.")
    with _refusals():
        load(state, reader, group, LoadPlanner(records, parts, delayed))
    extra = _unpacked(state["extra"]) if packed else entries
    _rename(state, {one.name: one.local_name for one in records.values()})
    for name, (local_name, experts) in old.items():
        value = state["model"].pop(name)
        if experts is not None:
            of_rank = range(experts.first, experts.first + experts.number // experts.ranks)
            value = value.unflatten(-1, (-1, experts.number))[..., of_rank].flatten(-2)
        state["model"][local_name] = value
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return extra


def _state(
    model: nn.Module, optimizer: Any, extra: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, ParameterRecord]]:
    """Return this rank's state under its names in the whole model, and the records of parameters and buffers."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if extra is not None:
        state["extra"] = _packed(extra)
    if optimizer is not None:
        try:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        except KeyError:  # of the number of a parameter
            own = set(model.parameters())
            others = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
            if not others:
                raise
            raise ValueError(
                f"optimizer has {_checks.counted(len(others), 'parameter')} that the model has not, the first of shape "
                f"{tuple(others[0].shape)}; pass the optimizer that was made of model.parameters()"
            ) from None
    records = describe_parameters(model, buffers=True).values()
    _rename(state, {one.local_name: one.name for one in records})
    return state, {one.name: one for one in records}


def _rename(state: dict[str, Any], names: dict[str, str]) -> None:
    """Give the values of a state other names; groups of an optimizer keep the parameters that have one."""
    state["model"] = {names.get(name, name): value for name, value in state["model"].items()}
    if "optimizer" in state:
        held = state["optimizer"]["state"]
        state["optimizer"]["state"] = {names.get(name, name): value for name, value in held.items()}
        for one in state["optimizer"]["param_groups"]:
            one["params"] = [names[name] for name in one["params"] if name in names]


def _joined(groups: list[dict[str, Any]], of_ranks: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the parameters of all ranks, which may hold different ones.

    Raises:
        ValueError: ranks have different options of a group.
    """
    joined: list[dict[str, Any]] = []
    for rank, others in of_ranks.items():
        for number, one in enumerate(others):
            if number == len(joined):
                joined.append({**one, "params": []})
            for name in {**one, **joined[number]}.keys() - {"params"}:
                first, value = joined[number].get(name), one.get(name)
                if digest(first) != digest(value):
                    raise ValueError(
                        f"group {number} of the optimizer has {name}={value} on rank {rank} and {first} before; give "
                        "the groups of all ranks the same options, in the same order"
                    )
            joined[number]["params"] += one["params"]
    for one in joined:
        one["params"] = [*dict.fromkeys(one["params"])]
    for mine, one in zip(groups, joined):
        mine["params"] = one["params"]
    return groups + joined[len(groups) :]


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """Return what ranks tell each other of a group, and compare; tensors are compared as values of the state."""
    return {name: value for name, value in group.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Return whether ranks can send each other a value and compare it."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _broadcast(model: nn.Module, records: dict[str, ParameterRecord]) -> dict[str, bool]:
    """Return whether this rank's copy counts, of buffers that ``DistributedDataParallel`` broadcasts."""
    found = {}
    for replica in model.modules():
        if isinstance(replica, nn.parallel.DistributedDataParallel) and replica.broadcast_buffers:
            first, ignored = (
                torch.distributed.get_rank(replica.process_group) == 0,
                set(replica.parameters_to_ignore),
            )
            sent = {id(value) for name, value in replica.module.named_buffers() if name not in ignored}
            found.update({name: first for name, one in records.items() if id(one.parameter) in sent})
    return found


def _packed(extra: dict[str, Any]) -> bytes:
    """Return ``extra`` as one value: PyTorch would flatten nested dicts and lists and drop empty ones."""
    written = io.BytesIO()
    torch.save(_plain(extra, "extra"), written)
    return written.getvalue()


def _unpacked(value: Any) -> dict[str, Any]:
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
        plain = {_plain(key, where): _plain(one, f"{where}[{shown(key)}]") for key, one in pairs}
        return plain if isinstance(value, dict) else type(value)(plain.values())
    if isinstance(value, torch.Tensor):
        record = describe_tensor(value)
        if record.stored == "codes" and record.mesh is None:
            return value.detach().cpu()
        return record.whole().as_subclass(torch.Tensor).to("cpu", copy=True).contiguous()
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise ValueError(
        f"{where} is {a_kind(value)}, which only unpickling could read; give numbers, strings, bytes, tensors "
        "and dicts, lists or tuples of them, such as torch.from_numpy(array) or str(path)"
    )


def _empty(described: Any) -> Any:
    """Return the destination of a value of the checkpoint."""
    size = getattr(described, "size", None)
    return 0 if size is None else torch.empty(size, dtype=described.properties.dtype)


def _states(model: nn.Module) -> Iterator[tuple[Place, DelayedLayer, str]]:
    """Yield place, layer and prefix of all stages that may scale with delay."""
    for _, place, layer in places(model):
        if isinstance(layer, DelayedLayer):
            for stage in layer._stage_names:
                yield place, layer, stage


def _names_of_state(model: nn.Module) -> set[str]:
    """Return the names of delayed scaling's state in the whole model, and in checkpoints of earlier versions."""
    return {
        f"{place.name}.{own}".lstrip(".")
        for place, _, stage in _states(model)
        for own in (*state_names(stage), *names_apart(stage))
    }


def _old_names(model: nn.Module, there: dict[str, Any]) -> dict[str, tuple[str, Experts | None]]:
    """Return names of a checkpoint with each direction apart -> names on this rank, and experts in the columns."""
    old: dict[str, tuple[str, Experts | None]] = {}
    for place, layer, stage in _states(model):
        if is_saved(layer, state_names(stage)[0]):  # else of this rank's experts alone, which begin anew
            experts = place.experts if isinstance(layer, GroupedLinearLayer) else None
            for own in names_apart(stage):
                if f"model.{place.name}.{own}".replace("..", ".") in there:
                    local_name = f"{place.local_name}.{own}".lstrip(".")
                    old[f"{place.name}.{own}".lstrip(".")] = local_name, experts
    return old


@torch.no_grad()
def _make_room(model: nn.Module, there: dict[str, Any]) -> None:
    """Make delayed state that a checkpoint has, for layers that do not know of it yet."""
    for place, layer, stage in _states(model):
        for own in state_names(stage):
            described = there.get(f"model.{place.name}.{own}".replace("..", "."))
            if described is None or not is_saved(layer, own):
                continue  # the latter of this rank's experts alone, which begin anew
            buffer = own_buffers(layer)[own]
            size = list(described.size)
            if place.experts is not None and isinstance(layer, GroupedLinearLayer):
                size[-1] //= place.experts.ranks
            if buffer is None or list(buffer.shape) != size:
                device = next(layer.parameters()).device
                own_buffers(layer)[own] = torch.zeros(size, dtype=torch.float32, device=device)


class _Writing:
    """A folder beside a checkpoint, of a name of its own, in which its successor is written.

    It is locked while it is written. So what killed processes have left is known, and removed.
    """

    def __init__(self, target: Path) -> None:
        begin = f"{target.name}.writing"
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.iterdir():
            if left.name == begin or left.name.startswith(f"{begin}-"):
                _remove_unlocked(left)
        self.folder = target.with_name(f"{begin}-{secrets.token_hex(4)}")
        self.folder.mkdir()
        self._lock = None
        if fcntl is not None:
            self._lock = os.open(self.folder, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_SH)

    def end(self) -> None:
        """Remove the folder, unless it has another name by now."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _remove_unlocked(folder: Path) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # locked, removed meanwhile, or on a file system without locks
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _replace(target: Path, written: Path) -> None:
    """Put a written folder in the place of another, which until then is there, or beside it as ``.old``."""
    old = target.with_name(target.name + ".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    written.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    """Write tensors without a CRC of their bytes, which no reader compares and which takes a third of the writing."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise the refusal inside of PyTorch's error, which lists the tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as error:
        inside = [one for one, _ in error.failures.values()]
        refusal = next((one for one in inside if isinstance(one, Refused)), None)
        if refusal is None:
            raise
        raise ValueError(str(refusal)) from None
