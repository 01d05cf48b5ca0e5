"""Activations that wait for their backward in the memory of the host.

What autograd saves passes through ``torch.autograd.graph.saved_tensors_hooks``. Layers save the buffers of what they
quantized, so codes and scales are what moves, not bf16. A storage moves once, however many saved tensors look at it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ._checks import flags, positive, shown
from ._checks import tensor as tensor_given
from ._tracing import refuse_in_graphs, users_level
from .upstream.tensors import base_of, has_inner_tensors, storage_key, tree_leaves, version_of

LEAST_ELEMENTS = 256 * 1024

# Storage -> itself. The references keep addresses from being given out again.
_NOT_OFFLOADED: dict[int, StorageWeakRef] = {}


def mark_not_offload(*tensors: Tensor | None) -> None:
    """Keep tensors, and all tensors that share their storage, on the device when autograd saves them.

    Args:
        tensors: plain or quantized; None is skipped. Parameters stay anyway, except for the codes of quantized ones.
    """
    for key in [key for key, kept in _NOT_OFFLOADED.items() if kept.expired()]:
        _NOT_OFFLOADED.pop(key, None)
    for tensor in tensors:
        if tensor is None:
            continue
        tensor_given("a tensor", tensor)
        if has_inner_tensors(tensor):
            mark_not_offload(*(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]))  # type: ignore[attr-defined]
            continue
        kept = StorageWeakRef(tensor.untyped_storage())
        _NOT_OFFLOADED[kept.cdata] = kept


def _stays(tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter) or tensor.is_meta:
        return True
    return tensor.numel() < LEAST_ELEMENTS or storage_key(tensor) in _NOT_OFFLOADED


class _Saved(NamedTuple):
    """A tensor that autograd saved, and its version then: behind hooks, PyTorch does not compare versions."""

    saved: Tensor
    version: int

    def is_modified(self) -> bool:
        """Return whether code has modified the tensor in place since."""
        return version_of(self.saved) != self.version

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was modified in place since, so this is not what the backward is to see.
        """
        if self.is_modified():
            raise RuntimeError(
                "a tensor or parameter that autograd saved inside the offload context was modified in place before its "
                "backward; run the backward before the optimizer's step, and modify a clone"
            )
        return self.saved


class _Moved:
    """One storage that a layer saved: on the device, in the memory of the host, or both."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.on_device: Tensor | None = whole.set_(tensor.untyped_storage())  # type: ignore[call-overload]
        self.on_host: Tensor | None = None
        self.saved: list[_Saved] = []  # while it is on the device as it was saved

    def to_host(self) -> None:
        """Copy it to the host, on the current stream.

        Raises:
            RuntimeError: it was written to since it was saved, so this is not what the backward is to see.
        """
        assert self.on_device is not None
        if any(saved.is_modified() for saved in self.saved):
            raise RuntimeError(
                "a tensor that autograd saved was modified in place before its layer ended, and would be offloaded as "
                "it is now; do not modify it, or pass on a clone"
            )
        pinned = self.device.type == "cuda"
        host = torch.empty(self.on_device.shape, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.on_host = host.copy_(self.on_device, non_blocking=pinned)

    def leave(self) -> None:
        """Free the device memory of what the host has."""
        if self.on_host is not None:
            self.on_device, self.saved = None, []

    def to_device(self) -> None:
        """Copy it back, on the current stream, to memory that is there."""
        assert self.on_device is not None and self.on_host is not None
        self.on_device.copy_(self.on_host, non_blocking=self.device.type == "cuda")


class _Handle:
    """Autograd's stand-in for a tensor: its storage, and the place in it."""

    def __init__(self, layer: _Layer, moved: _Moved, tensor: Tensor) -> None:
        self.layer, self.moved, self.dtype = layer, moved, tensor.dtype
        self.number = len(moved.saved)
        moved.saved.append(_Saved(tensor, version_of(tensor)))
        self.place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def tensor(self) -> Tensor:
        """Return the tensor again, on its device; may be called more than once."""
        if self.moved.saved:
            self.moved.saved[self.number].tensor()
        storage = self.layer.loaded(self.moved).untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=self.moved.device).set_(storage, *self.place)  # type: ignore[call-overload]


class _Layer:
    """The tensors that one layer of one forward has saved.

    Copies run on a side stream. The device's memory is let go only once the stream that computes was told to wait for
    the copy, so it is used again in the order of that stream, however far ahead the CPU is.
    """

    def __init__(self, stream: Callable[[torch.device], Any]) -> None:
        self.stream = stream
        # Handles hold what moved, and autograd holds handles: what it lets go of is free at once.
        self.moved: weakref.WeakSet[_Moved] = weakref.WeakSet()
        self.leaving: dict[int, _Moved] = {}  # by storage, which they keep until they have left
        self.copied: Any = None
        self.reloaded: Any = None

    def pack(self, tensor: Any) -> Any:
        if has_inner_tensors(tensor):
            if isinstance(tensor, nn.Parameter):
                return _Saved(tensor, version_of(tensor))
            names, context = tensor.__tensor_flatten__()
            inner = {name: self.pack(getattr(tensor, name)) for name in names}
            return type(tensor), inner, context, tensor.shape, tensor.stride()
        if _stays(tensor):
            return _Saved(tensor, version_of(tensor))
        key = storage_key(tensor)
        if key not in self.leaving:
            self.leaving[key] = _Moved(tensor)
            self.moved.add(self.leaving[key])
        return _Handle(self, self.leaving[key], tensor)

    def start_offload(self) -> None:
        """Copy what was saved to the host, beside what the device goes on with."""
        self.copied = self._beside(list(self.leaving.values()), _Moved.to_host)

    def release(self) -> None:
        """Free the device memory of copied tensors."""
        _wait(self.copied)
        for moved in self.leaving.values():
            moved.leave()
        self.leaving, self.copied = {}, None

    def start_reload(self) -> None:
        """Copy back what is not on the device, beside what the device goes on with."""
        absent = [moved for moved in self.moved if moved.on_device is None]
        for moved in absent:  # memory of the stream that computes: it uses it, and gets it back
            assert moved.on_host is not None
            moved.on_device = torch.empty(moved.on_host.shape, dtype=torch.uint8, device=moved.device)
        if absent:
            self.reloaded = self._beside(absent, _Moved.to_device)

    def loaded(self, moved: _Moved) -> Tensor:
        """Return a storage on the device, copied now unless its copy has started."""
        if moved.on_device is None:
            self.start_reload()
        _wait(self.reloaded)
        assert moved.on_device is not None
        return moved.on_device

    def end_backward(self) -> None:
        """Keep only the host copy of what a retained graph still holds."""
        _wait(self.reloaded)
        self.reloaded = None
        for moved in self.moved:
            moved.leave()

    def _beside(self, moved: list[_Moved], copy: Callable[[_Moved], None]) -> Any:
        """Return copies on the side stream, after what was computed so far; the event of their end, None on a CPU."""
        side = self.stream(moved[0].device) if moved else None
        if side is None:
            for one in moved:
                copy(one)
            return None
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            for one in moved:
                copy(one)
            return side.record_event()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, (_Handle, _Saved)):
        return packed.tensor()
    if isinstance(packed, tuple):
        cls, inner, context, shape, stride = packed
        tensors = {name: _unpack(part) for name, part in inner.items()}
        return cls.__tensor_unflatten__(tensors, context, shape, stride)
    return packed  # type: ignore[no-any-return]


def _wait(event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class _Forward:
    """The layers of one forward, in order."""

    def __init__(self) -> None:
        self.layers: list[_Layer | None] = []

    def begin_backward(self, index: int) -> None:
        """The gradient of a layer's output is there: its tensors are needed now, those of the one before soon."""
        for step, act in ((1, _Layer.end_backward), (0, _Layer.start_reload), (-1, _Layer.start_reload)):
            at = index + step
            layer = self.layers[at] if 0 <= at < len(self.layers) else None
            if layer is not None:
                act(layer)


class _Offload:
    """Context and synchronization of :func:`get_cpu_offload_context`."""

    def __init__(self, offloaded: int, model_layers: int, manual: bool, stream: Any) -> None:
        self.offloaded, self.model_layers, self.manual = offloaded, model_layers, manual
        self.given = stream
        self.side: dict[torch.device, Any] = {}
        self.forward = _Forward()
        self.hooks: Any = None
        self.synchronised = True

    def stream(self, device: torch.device) -> Any:
        """Return the stream of the copies; None if they need none."""
        if device.type != "cuda":
            return None
        if device not in self.side:
            self.side[device] = self.given or torch.cuda.Stream(device)
        return self.side[device]

    def __enter__(self) -> _Offload:
        refuse_in_graphs(
            "the offload context is inside a function compiled with fullgraph=True, and its copies are no part of "
            "a graph; compile the layers inside the context, or leave fullgraph out"
        )
        if not self.synchronised:
            raise RuntimeError(
                "the offload context was entered again before the sync function; call it with each layer's output"
            )
        if len(self.forward.layers) == self.model_layers:
            self.forward = _Forward()
        index = len(self.forward.layers)
        layer = _Layer(self.stream) if index < self.offloaded else None
        self.forward.layers.append(layer)
        self.synchronised = False
        if layer is not None:
            self.hooks = torch.autograd.graph.saved_tensors_hooks(layer.pack, _unpack)
            self.hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.hooks is not None:
            self.hooks.__exit__(*exception)
            self.hooks = None
        if exception and exception[0] is not None:  # the layer failed: the next forward starts again
            self.synchronised, self.forward = True, _Forward()

    def synchronise(self, output: Any) -> Any:
        """Called with the output of each layer, which it returns: the layer's tensors leave, and come back in time."""
        index = len(self.forward.layers) - 1
        self.synchronised = True
        if self.manual:
            return output
        for at, act in ((index, _Layer.start_offload), (index - 1, _Layer.release)):
            layer = self.forward.layers[at] if at >= 0 else None
            if layer is not None:
                act(layer)
        forward = self.forward
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: forward.begin_backward(index))
        return output


class ManualOffloadSynchronizer:
    """Starts the copies of layers, by index in the last forward. A layer that was not reloaded is when it is needed."""

    def __init__(self, offload: _Offload | None) -> None:
        self._offload = offload

    def start_offload_layer(self, layer_id: int) -> None:
        """Start to copy a layer's saved tensors to the host."""
        self._call(layer_id, _Layer.start_offload)

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Free the layer's device memory, once it is copied."""
        self._call(layer_id, _Layer.release)

    def start_reload_layer(self, layer_id: int) -> None:
        """Start to copy a layer's saved tensors back."""
        self._call(layer_id, _Layer.start_reload)

    def _call(self, layer_id: int, act: Callable[[_Layer], None]) -> None:
        if self._offload is None:
            return
        layers = self._offload.forward.layers
        if not 0 <= layer_id < len(layers):
            raise ValueError(f"layer_id is {layer_id}; the last forward had layers 0 to {len(layers) - 1}")
        layer = layers[layer_id]
        assert layer is not None
        act(layer)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.cuda.Stream | None = None,
) -> tuple[Any, ...]:
    """Return a context for each layer's forward, and a function for its output; saved tensors wait on the host.

    Tensors saved inside the context move to pinned memory while the next layer computes, and back while the layer after
    theirs runs its backward: the device holds the activations of two layers instead of ``num_layers``. Quantized
    operands move as codes and scales. Parameters, tensors of fewer than 2**18 elements and tensors of
    :func:`mark_not_offload` stay. Results have the same bits. Eager code; layers inside may be compiled with
    ``fullgraph=True``, code around them only without. CPU tensors are copied, too, for tests.

    Args:
        enabled: False returns objects that do nothing.
        num_layers: the first so many layers are offloaded; the last one never is, as its backward starts at once.
        model_layers: number of layers in a forward.
        offload_activations: must be True to offload anything.
        offload_weights: without effect, deprecated.
        double_buffering, retain_pinned_cpu_buffers: without effect: PyTorch keeps pinned memory for the next use.
        manual_synchronization: only the third object starts copies.
        offload_stream: the stream of the copies, for manual synchronization.

    Returns:
        (context, sync_function), with manual synchronization (context, sync_function, ManualOffloadSynchronizer).
        ``output = sync_function(output)`` follows each ``with context: output = layer(x)``.

    Raises:
        ValueError: nothing to offload, ``num_layers`` above ``model_layers - 1`` or below 1, or a stream without manual
            synchronization.
        RuntimeError: entering again before the sync function; under ``torch.compile``.
    """
    flags(enabled=enabled, offload_activations=offload_activations, offload_weights=offload_weights)
    flags(manual_synchronization=manual_synchronization)
    if not enabled:
        idle = (contextlib.nullcontext(), lambda output: output)
        return (*idle, ManualOffloadSynchronizer(None)) if manual_synchronization else idle
    if offload_weights:
        warnings.warn(
            "offload_weights has no effect; weights stay on the device",
            DeprecationWarning,
            stacklevel=users_level(),
        )
    if not offload_activations:
        raise ValueError(
            "there is nothing to offload: offload_activations is False; pass enabled=False instead"
        )
    if not manual_synchronization:
        positive(model_layers=model_layers, num_layers=num_layers)
    if not manual_synchronization and model_layers < 2:
        raise ValueError(
            f"model_layers is {shown(model_layers)}; use the number of layers in a forward, 2 or more: the last one's "
            "backward comes at once, and it is never offloaded"
        )
    if not manual_synchronization and not 1 <= num_layers <= model_layers - 1:
        raise ValueError(
            f"num_layers is {num_layers} of model_layers={model_layers}; use 1 to {model_layers - 1}, the last layer's "
            "backward comes at once"
        )
    if offload_stream is not None and not manual_synchronization:
        raise ValueError("offload_stream is for manual_synchronization=True; leave it out")
    offloaded = model_layers if manual_synchronization else num_layers
    context = _Offload(offloaded, model_layers, manual_synchronization, offload_stream)
    parts = (context, context.synchronise)
    return (*parts, ManualOffloadSynchronizer(context)) if manual_synchronization else parts
