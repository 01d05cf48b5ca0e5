"""Torch behavior of quantized tensors: operators see values, in-place operators requantize, views are read-only.

``QuantizedTensor`` and ``GroupedTensor`` stand on :class:`DequantizingTensor`. A view of one is a copy of its values in
the end, so a write through it would be lost: :class:`DequantizedView` refuses it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._checks import a_kind
from ..upstream.compiler import never_compiled
from ..upstream.functionalization import FunctionalTensor
from ..upstream.tensors import make_wrapper, no_torch_function, schema_of, tree_leaves, tree_map_only

aten = torch.ops.aten

Handler = Callable[..., Any]


class DequantizingTensor(Tensor):
    """Base of the tensors that hold codes and count as their values.

    A concrete class says what its values are (``_plain``), how they are replaced (``_overwrite``), and how its ``data``
    is (``_quantized``, ``_adopt``, ``to_dtype``).
    """

    _high_precision_init_val: Tensor | None = None
    _of_parameter: bool = False
    """Whether it has the attributes of the parameter that it was made from."""
    _keeps_codes: bool = False
    """Whether ``to`` its own dtype keeps the codes: accelerate calls that on what it puts into a module."""
    _HANDLERS: ClassVar[dict[Any, Handler]] = {}
    """Operators that work on the codes, with what runs in their place: ``handler(func, *args, **kwargs)``."""

    def _plain(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, apart from autograd."""
        raise NotImplementedError

    def _overwrite(self, values: Tensor) -> None:
        """Quantize values of this shape into the buffers that are there."""
        raise NotImplementedError

    def _quantized(self, values: Tensor) -> DequantizingTensor:
        """Return another tensor of this kind, made of plain values."""
        raise NotImplementedError

    def _adopt(self, source: Any) -> None:
        """Take over the buffers and the description of a tensor of this class."""
        raise NotImplementedError

    def _like(self, map_buffer: Callable[[Tensor], Tensor]) -> Any:
        """Return another tensor of this kind, around what a function makes of each buffer."""
        raise NotImplementedError

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """Return the wrapper around the same buffers with another nominal dtype; nothing is requantized."""
        raise NotImplementedError

    @property
    def data(self) -> Any:  # type: ignore[override]
        """This tensor without its history; assigning adopts another's buffers, or quantizes a plain tensor.

        Raises:
            ValueError: assigned is a quantized tensor of another class.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        source = value if isinstance(value, DequantizingTensor) else self._with_values(value.detach())
        if type(source) is not type(self):
            raise ValueError(f"cannot make {a_kind(self)} hold the data of {a_kind(source)}")
        Tensor.data.__set__(self, source)  # type: ignore[attr-defined]
        self._adopt(source)

    def _with_values(self, values: Tensor) -> DequantizingTensor:
        """Return a tensor of these values: with this tensor's codes if they decode to just that, as in
        ``module.half()``.
        """
        if values.shape == self.shape:
            own: Any = self.detach().to(values.device)
            if values.is_meta or torch.equal(own._plain(values.dtype), values):
                return own.to_dtype(values.dtype)
        return self._quantized(values)

    def data_ptr(self) -> int:
        """Return the address of the first buffer: what tells parameters apart by their memory reads it."""
        held = next((buffer for buffer in self.get_data_tensors() if buffer is not None), None)  # type: ignore[attr-defined]
        return 0 if held is None else held.data_ptr()

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy buffers, gradient and attributes; PyTorch would copy a storage, as there is an address.

        Raises:
            RuntimeError: the tensor has a history, as for any tensor.
        """
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = self.clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        copied.grad = copy.deepcopy(self.grad, memo)
        vars(copied).update(copy.deepcopy(self.__dict__, memo))
        return copied

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """High-precision values; the gradient passes through unchanged."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype or self.dtype)
        return self._plain(dtype)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Act like ``Tensor.to``. A device keeps the codes; a dtype, even the current one, returns plain values."""
        if torch.compiler.is_compiling():  # the handlers of the operators below do it
            return super().to(*args, **kwargs)
        given = [*args, *kwargs.values()]
        dtypes = [
            a if isinstance(a, torch.dtype) else a.dtype
            for a in given
            if isinstance(a, (torch.dtype, Tensor))
        ]
        if self._keeps_codes and args == (self.dtype,) and not kwargs.keys() - {"non_blocking"}:
            return self
        return self.dequantize(dtype=dtypes[0]).to(*args, **kwargs) if dtypes else super().to(*args, **kwargs)

    def float(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return dequantized fp32 values."""
        return self.dequantize(dtype=torch.float32)

    def half(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return dequantized fp16 values."""
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return dequantized bf16 values."""
        return self.dequantize(dtype=torch.bfloat16)

    def share_memory_(self) -> DequantizingTensor:
        """Move the buffers to memory that processes share."""
        for buffer in self.get_data_tensors():  # type: ignore[attr-defined]
            if buffer is not None:
                buffer.share_memory_()
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """Return CPU copy of the value this parameter was made from, if ``quantized_model_init`` kept one."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Drop that copy."""
        self._high_precision_init_val = None

    __torch_function__ = no_torch_function

    @classmethod
    @never_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_in_any_mode(cls._run, func, args, kwargs or {})

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        handler = cls._HANDLERS.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        if schema_of(func).is_mutable:
            return _run_in_place(func, args, kwargs)
        begins = _begin_of(args)
        args, kwargs = tree_map_only(DequantizingTensor, _plain_of, (args, kwargs))
        return _view_of(func, func(*args, **kwargs), begins)


def plain(tensor: Any) -> Tensor:
    """Return the values of a quantized tensor, differentiable; any other tensor as it is."""
    return tensor.dequantize() if isinstance(tensor, DequantizingTensor) else tensor


class DequantizedView(Tensor):
    """Values of a view of a quantized tensor: read as any tensor is, but not to be written to.

    Args:
        values: what the view shows.
        begins: where what the values were decoded from begins in the whole quantized tensor.
    """

    @staticmethod
    def __new__(cls, values: Tensor, begins: int = 0) -> DequantizedView:
        return make_wrapper(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )

    def __init__(self, values: Tensor, begins: int = 0) -> None:
        self._held, self._begins = values, begins

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy as an array."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as a list."""
        return self.clone().tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Copy the values with all memory that they lie in, as PyTorch does: offsets of ``as_strided`` count in it.

        A later part's values do not lie in the memory of the whole tensor, so their copy stays a view that knows it.

        Raises:
            RuntimeError: the view has a history, as for any tensor.
        """
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        values = copy.deepcopy(self._held, memo)
        return DequantizedView(values, self._begins) if self._begins else values

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (
            (DequantizedView, (self._held, self._begins))
            if self._begins
            else self._held.__reduce_ex__(protocol)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._held!r})"

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """Return name of the values and where they begin."""
        return ["_held"], self._begins

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: int, outer_size: Any, outer_stride: Any
    ) -> DequantizedView:
        """Rebuild from ``__tensor_flatten__``'s parts."""
        return DequantizedView(inner_tensors["_held"], context)

    __torch_function__ = no_torch_function

    @classmethod
    @never_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_in_any_mode(cls._run, func, args, kwargs or {})

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run on the values.

        Raises:
            RuntimeError: the operator writes to a view, or is ``as_strided`` as :func:`check_offset` refuses it.
        """
        if func is aten.as_strided.default:
            check_offset(_begin_of(args), *args[3:], **kwargs)
        if schema_of(func).is_mutable:
            given = _by_name(func, args, kwargs)
            written = tree_leaves([given[name] for name in _written(func) & given.keys()])
            if any(isinstance(tensor, DequantizedView) for tensor in written):
                raise RuntimeError(
                    f"{func} writes through a view of a quantized tensor, whose codes would not see it; write to the "
                    "tensor itself (w[0] = w[0] + x, w.copy_(x), w.mul_(x)), or clone() the view to have its own"
                )
        begins = _begin_of(args)
        args, kwargs = tree_map_only(DequantizedView, _held_by, (args, kwargs))
        return _view_of(func, func(*args, **kwargs), begins)


def read_only(values: Tensor, begins: int = 0) -> Tensor:
    """Return the result of a view of a quantized tensor that shows these values; ``begins``: of
    :class:`DequantizedView`.
    """
    # Writes are refused while a graph is traced. In the graph the values stay plain, since its backward takes plain
    # gradients only.
    return values if isinstance(values, FunctionalTensor) else DequantizedView(values, begins)


def check_offset(begins: int, storage_offset: int | None = None) -> None:
    """Refuse an offset of ``as_strided``, which counts from the start of the whole tensor, on a later part of it.

    Raises:
        RuntimeError: it is given, and the part begins later.
    """
    if begins and storage_offset is not None:
        raise RuntimeError(
            f"as_strided with storage_offset={storage_offset} counts from the start of the whole tensor, of which this "
            f"part begins at {begins} and holds no more than itself; call it on the whole tensor, or leave "
            "storage_offset out"
        )


def _begin_of(args: tuple[Any, ...]) -> int:
    return getattr(args[0], "_begins", 0) if args else 0


def _view_of(func: Any, result: Any, begins: int) -> Any:
    """Return an operator's result on values; a view of them is read-only."""
    return tree_map_only(Tensor, lambda values: read_only(values, begins), result) if func.is_view else result


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DequantizingTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor._plain(dtype).detach()  # no view, which operators in place refuse to write to

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output.to(ctx.dtype), None


def handles_in(handlers: dict[Any, Handler]) -> Callable[..., Callable[[Handler], Handler]]:
    """Return a decorator that enters what handles some operators in a table, which begins with what all tables have."""
    handlers.update({aten.clone.default: _clone, aten._to_copy.default: _to_copy})

    def handles(*overloads: Any) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            handlers.update(dict.fromkeys(overloads, handler))
            return handler

        return register

    return handles


def _clone(func: Any, tensor: DequantizingTensor, **kwargs: Any) -> DequantizingTensor:
    return tensor._like(lambda buffer: buffer.clone())


def _to_copy(func: Any, tensor: DequantizingTensor, **kwargs: Any) -> Tensor:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if dtype not in (None, tensor.dtype):
        return func(tensor._plain(dtype), **kwargs)
    moved = tensor._like(
        lambda buffer: buffer.to(device, copy=True) if device is not None else buffer.clone()
    )
    return with_attributes_of(tensor, moved)


def with_attributes_of(source: DequantizingTensor, result: Any, but: tuple[str, ...] = ()) -> Any:
    """Return the result, with what was set on the parameter that it was made from.

    ``Module.to`` makes a parameter of it and swaps the two, attributes included; a plain parameter stays what it is.
    """
    own, set_on_it = vars(result), vars(source)
    if len(set_on_it) > len(own) and (source._of_parameter or isinstance(source, torch.nn.Parameter)):
        left_out = {*own, "_is_param", *but}
        own.update((name, value) for name, value in set_on_it.items() if name not in left_out)
        result._of_parameter = True
    return result


def is_all_of(tensor: Tensor, size: Any, stride: Any, storage_offset: int | None) -> bool:
    """Return whether ``as_strided`` returns the whole tensor unchanged."""
    return tuple(size) == tuple(tensor.shape) and tuple(stride) == tensor.stride() and not storage_offset


def _plain_of(tensor: DequantizingTensor) -> Tensor:
    return tensor._plain()


def _held_by(view: DequantizedView) -> Tensor:
    return view._held


def _run_in_any_mode(run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Return ``run(func, args, kwargs)``, also under ``torch.inference_mode``.

    There, composite operators arrive whole, and a view of a tensor from outside must be made outside as well.
    """
    if torch.is_inference_mode_enabled():
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.is_view:
            with torch.inference_mode(False), torch.no_grad():
                return run(func, args, kwargs)
    return run(func, args, kwargs)


def _by_name(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by the names of its schema."""
    return {**dict(zip([argument.name for argument in schema_of(func).arguments], args)), **kwargs}


def _written(func: Any) -> set[str]:
    """Return names of the arguments that an operator writes to."""
    return {a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write}


_UPDATES = ("add_", "addcdiv_", "addcmul_", "lerp_", "sub_")
"""In-place operators by which optimizers change a weight a little, also with ``_foreach_`` before the name."""


def _warn_if_updated(func: Any, target: DequantizingTensor) -> None:
    """Warn if an operator adds to the codes of a weight that trains, as an optimizer without master weights does."""
    name = func.overloadpacket.__name__
    updates = name.removeprefix("_foreach_") in _UPDATES or name.startswith("_fused_")
    if updates and (target.requires_grad or getattr(target, "_is_shard", False)):
        warnings.warn(
            f"an optimizer adds to the codes of {a_kind(target)} that trains: the sum is rounded to codes, so "
            "small steps change nothing; use narrowcast.optimizers.FusedAdam(master_weights=True), or decode what was "
            "stored with narrowcast.revert(model) before you make the optimizer",
            stacklevel=2,
        )


def _run_in_place(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Dequantize, run, and requantize every argument the schema writes to; keywords are paired by name.

    Warns: an optimizer's update of codes, which loses steps smaller than their distance.
    """
    given = _by_name(func, args, kwargs)
    plain = {name: tree_map_only(DequantizingTensor, _plain_of, value) for name, value in given.items()}
    positional = tuple(plain.values())[: len(args)]
    result = func(*positional, **{name: plain[name] for name in kwargs})
    originals: dict[int, Any] = {}
    for name in _written(func) & given.keys():
        for target, source in zip(tree_leaves(given[name]), tree_leaves(plain[name]), strict=True):
            originals[id(source)] = target
            if isinstance(target, DequantizingTensor):
                _warn_if_updated(func, target)
                target._overwrite(source)
    return tree_map_only(Tensor, lambda returned: originals.get(id(returned), returned), result)
