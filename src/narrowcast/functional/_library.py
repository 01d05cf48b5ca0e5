"""The operator library ``narrowcast::*`` and the one way to define an operator in it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import _get_proxies, get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from .._environment import read_flag
from .._tracing import PLAIN, count_modes, is_autocast, is_profiled
from . import _opaque
from .quantizer_value import QuantizerValue, quantizer_of_text
from .replay import Recording


def _library() -> torch.library.Library:
    """The one library of this namespace; that of an import before this one, whose modules were deleted, ends."""
    of_namespace = vars(torch.ops.narrowcast)
    if "_library" in of_namespace:
        of_namespace.pop("_library")._destroy()
    of_namespace["_library"] = torch.library.Library("narrowcast", "DEF")
    return of_namespace["_library"]


_LIBRARY = _library()

QUANTIZER = _opaque.schema_type(QuantizerValue) if _opaque.AVAILABLE else "Any"


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
    inlined: Callable[..., bool] | None = None,
    shared: bool = False,
    of_state: bool = False,
    saved: bool = False,
) -> Callable[..., Any]:
    """Define ``narrowcast::<schema>`` and return its default overload.

    Where its tensors are of static shape and on a GPU, and ``inlined``, given its arguments, says so, a compiled graph
    holds what the implementation launches in place of the operator; see :func:`_inline`. ``shared``: calls with the
    same arguments are then one, for operators whose outputs nobody writes to and no graph returns. ``of_state``: its
    tensors are a layer's state and never have gradients, so that it does not matter whether any are recorded.
    ``saved``: a compiled checkpoint saves the outputs; the backward never repeats the operator.

    One implementation serves CPU and CUDA tensors: it picks reference or kernels from the device. Outputs must alias
    neither an input nor each other, and the fake's strides must be the real ones; the compiler relies on both.
    What is returned calls the overload, except where nobody but the implementation would see the call; see
    :func:`_with_shortcut`.
    Without the opaque-object API an operator that takes a quantizer is its plain Python implementation, eager only.
    """
    if not _opaque.AVAILABLE and QUANTIZER in schema:
        return implementation
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, _without_autocast(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowcast::{name}", _all_on_meta(name, fake), lib=_LIBRARY)
    rule = _inline(implementation, inlined, shared)
    torch.library.register_torch_dispatch(
        f"narrowcast::{name}",
        FunctionalTensorMode,
        _saved(rule) if saved else rule,
        lib=_LIBRARY,
    )
    torch.library.register_torch_dispatch(
        f"narrowcast::{name}", Recording, _recorded(implementation), lib=_LIBRARY
    )
    if saved:  # PyTorch 2.13 has this mode tag the nodes of every checkpoint, 2.11 those of a selective one
        torch.library.register_torch_dispatch(
            f"narrowcast::{name}", _CachingTorchDispatchMode, _saved(_by_mode), lib=_LIBRARY
        )
    if QUANTIZER in schema or "ScalarType" in schema:
        _define_text_overload(name, schema, implementation, fake, tags)
    return _with_shortcut(getattr(torch.ops.narrowcast, name), implementation, of_state)


def _define_text_overload(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...],
) -> None:
    """``<name>.text``: the same operator with texts for quantizers, which is what a file can hold of a program.

    And for dtypes: what PyTorch 2.11 compiles ahead of time reads their numbers in a file as those of other dtypes.
    """
    schema = schema.replace(f"{name}(", f"{name}.text(", 1)
    schema = schema.replace(f"{QUANTIZER} ", "str ").replace("ScalarType ", "str ")
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    readers = _readers(getattr(torch.ops.narrowcast, name).text)

    def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(
            *(readers[i](arg) if i in readers else arg for i, arg in enumerate(args))
        )

    run, full_name = with_values(implementation), f"narrowcast::{name}.text"
    _LIBRARY.impl(f"{name}.text", _without_autocast(run), "CompositeExplicitAutograd")
    torch.library.register_fake(full_name, _all_on_meta(name, with_values(fake)), lib=_LIBRARY)
    torch.library.register_torch_dispatch(
        full_name, FunctionalTensorMode, _inline(run, None, shared=False), lib=_LIBRARY
    )


def _readers(overload: Any) -> dict[int, Callable[[str], Any]]:
    """From the positions of what is a text in ``<name>.text`` alone to what reads it."""
    names = [argument.name for argument in overload._schema.arguments]
    kinds = {"quantizer": quantizer_of_text, "dtype": functools.partial(getattr, torch)}
    return {i: read for i, name in enumerate(names) for kind, read in kinds.items() if name.endswith(kind)}


def _text_of(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value._value_text()


def _all_on_meta(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake that refuses tensors of which only some are on the meta device: real ones would get memory unwritten."""

    @functools.wraps(fake)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        kinds = {tensor.device.type for tensor in given if isinstance(tensor, Tensor)}
        if len(kinds) > 1 and "meta" in kinds:
            raise RuntimeError(
                f"narrowcast::{name} got tensors on {' and '.join(sorted(kinds))}; make those on the meta device real, "
                "with to_empty and reset_parameters or load_state_dict(assign=True), or put all of them there"
            )
        return fake(*args, **kwargs)

    return run


_PLAIN_ALONE = frozenset(PLAIN)


def _with_shortcut(
    packet: Any, implementation: Callable[..., Any], of_state: bool = False
) -> Callable[..., Any]:
    """The default overload, without the way through the dispatcher where that leads straight to ``implementation``.

    So it does for plain CUDA tensors in eager code that records no gradient: inside the autograd functions; and for
    state, which has none. It would cost as much as launching a kernel does. Traces, dispatch modes and the profiler do
    see the overload. A graph that is exported holds the overload ``text``, if there is one.
    """
    overload = packet.default
    as_text = getattr(packet, "text", overload)
    texts_at = () if as_text is overload else tuple(_readers(overload))
    arguments = overload._schema.arguments
    first = next((i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)), None)
    if first is None:
        return overload  # type: ignore[no-any-return]
    in_list = "List" in str(arguments[first].type)
    lists = [i for i, argument in enumerate(arguments) if str(argument.type) == "List[Tensor]"]
    run = _without_autocast(implementation)
    written = [i for i, argument in enumerate(arguments) if argument.alias_info is not None]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            # the flag itself: Dynamo of PyTorch 2.11 answers is_exporting() with True in whatever it traces
            if texts_at and torch.compiler._is_exporting_flag:
                return as_text(*[_text_of(arg) if i in texts_at else arg for i, arg in enumerate(args)])
            return overload(*args)
        if torch.is_grad_enabled() and not of_state:
            return overload(*args)
        x: Any = args[first]
        if in_list:
            x = x[0] if x else None
            for i in lists:
                if not _PLAIN_ALONE.issuperset(map(type, args[i])):
                    return overload(*args)  # a list of parameters may be one of many kinds
        if type(x) not in PLAIN or not x.is_cuda or count_modes() or is_profiled():
            return overload(*args)
        result = (run if is_autocast() else implementation)(*args)
        for i in written:  # as the dispatcher does for saved tensors to be found out of date
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])
        return result

    call.__doc__ = implementation.__doc__
    return call


_TAKING_APART = contextvars.ContextVar("taking_apart", default=False)


@contextlib.contextmanager
def taking_apart() -> Iterator[None]:
    """Functionalization leaves none of the library's operators whole, be the graph one to export or on a CPU."""
    token = _TAKING_APART.set(True)
    try:
        yield
    finally:
        _TAKING_APART.reset(token)


def _inline(
    implementation: Callable[..., Any], inlined: Callable[..., bool] | None, shared: bool
) -> Callable[..., Any]:
    """The rule by which functionalization meets an operator: trace its implementation, or keep it whole.

    Traced, its GEMMs and kernel launches are the graph's own: the compiler allocates for them, plans their memory and
    starts them from the code it generates, where an operator is a call into Python at every step. Kept whole are
    operators on a CPU, of dynamic shapes, in a graph to export, and all of them under ``NARROWCAST_INLINE=0``.
    """
    run = _without_autocast(implementation)

    def rule(mode: FunctionalTensorMode, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        _may_change(op, args)
        traced = _TAKING_APART.get() or (
            inlined is not None
            and not mode.export
            and _is_static_on_gpu(given)
            and read_flag("INLINE", True)
            and inlined(*given)
        )
        if not traced:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        _let_inductor_start_kernels()
        with mode:
            return once(mode, given) if shared else run(*args, **(kwargs or {}))

    def once(mode: FunctionalTensorMode, given: tuple[Any, ...]) -> Any:
        """The outputs of an earlier call of this graph on the same values; the compiler would launch twice."""
        results = vars(mode).setdefault("_narrowcast_results", {})  # as long as the trace
        key = (implementation, get_proxy_mode(), *(_identity(value) for value in given))
        if key not in results:
            # with the arguments, so that they live on and no other takes over their identity
            results[key] = (run(*given), given)
        return [output.view_as(output) for output in results[key][0]]

    return rule


def _may_change(op: Any, args: tuple[Any, ...]) -> None:
    """Tell a graph of the undeclared write to an amax: a backward that is given it need not find it as it was.

    As a tensor that an autograd function keeps on its context, where its gradients' own amax is.
    """
    if get_proxy_mode() is None:
        return
    for argument, value in zip(op._schema.arguments, args):
        if argument.name in ("amax", "amaxes") and argument.alias_info is None:
            for amax in value if isinstance(value, list) else [value]:
                for proxy in _get_proxies(amax) if isinstance(amax, Tensor) else ():
                    proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def _is_ours(quantizer: QuantizerValue) -> bool:
    parts = [value for value in vars(quantizer).values() if isinstance(value, QuantizerValue)]
    ours = type(quantizer).__module__.startswith("narrowcast.") and not quantizer._multiplies
    return ours and all(map(_is_ours, parts))


def _recorded(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The rule by which a recording meets an operator: it notes what the implementation does."""

    def rule(mode: Recording, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, QuantizerValue) and not _is_ours(arg) for arg in args):
            mode.refuse()  # who knows what its code depends on
        with mode:
            result = implementation(*args, **(kwargs or {}))
            for argument, value in zip(op._schema.arguments, args):
                if argument.alias_info is not None and value is not None:
                    mode.written(value)
        return result

    return rule


def _by_mode(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return mode.__torch_dispatch__(op, types, args, kwargs)


def _saved(rule: Callable[..., Any]) -> Callable[..., Any]:
    """``rule``, after which what it traced is tagged to be saved, whatever a checkpoint around it has said."""

    def run(*given: Any) -> Any:
        tracing = get_proxy_mode()
        if tracing is None:
            return rule(*given)
        graph = tracing.tracer.graph
        before = len(graph.nodes)
        outputs = rule(*given)
        for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - before):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return outputs

    return run


def _let_inductor_start_kernels() -> None:
    """Have graphs start library kernels as cheaply as the compiler's own.

    PyTorch's default starts them through Triton's launcher, which costs the host more. Only that default changes, in
    the whole process: ``TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS=0`` and
    ``options={"static_launch_user_defined_triton_kernels": False}`` of ``torch.compile`` still win. The public way to
    set an option reaches one thread, and graphs of a backward are compiled in another.
    """
    inductor = sys.modules.get("torch._inductor.config")
    option = inductor and inductor._config.get("static_launch_user_defined_triton_kernels")
    if option:
        option.default = True


def _identity(value: Any) -> Any:
    """Equal for the same value in a trace: of tensors the same part of the same storage, not written to in between."""
    if not isinstance(value, FunctionalTensor):
        return value
    x = value.elem
    where = (x.untyped_storage()._cdata, torch._functionalize_mutation_counter(x))
    return (*where, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())


def _is_static_on_gpu(given: Iterable[Any]) -> bool:
    tensors = []
    for value in given:
        if isinstance(value, torch.SymInt):
            return False
        tensors += [
            item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Tensor)
        ]
    return all(
        isinstance(x, FunctionalTensor) and x.is_cuda and all(isinstance(size, int) for size in x.shape)
        for x in tensors
    )


def always(*_: Any) -> bool:
    """For ``inlined``: wherever shapes and devices allow."""
    return True


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An ambient torch.autocast must not reach into the numerics: their matrix products are fp32 on purpose."""

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return implementation(*args, **kwargs)

    return run
