"""The operator library ``narrowcast::*`` and the one way to define an operator in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .._tracing import PLAIN, while_tracing
from ..upstream import opaque
from ..upstream.autograd import forward_level, has_tangent
from ..upstream.compiler import NotInGraph, is_tracer_running, mark_cacheable, start_kernels_statically
from ..upstream.functionalization import FunctionalMode, FunctionalTensor, end_library, state_key
from ..upstream.tensors import autocast_off, is_exporting, schema_of
from .lowering import RULES, Rule, register_rules
from .quantizer_value import QuantizerValue, quantizer_of_text, rules_of_graphs
from .replay import Recording
from .routes import (
    DISPATCHED,
    SHORTCUT,
    TEXT,
    WHOLE,
    eager_watcher,
    is_static_on_gpu,
    tensors_among,
    watcher_in_graph,
)


def _library() -> torch.library.Library:
    """Return the one library of this namespace; that of an import before this one, whose modules were deleted, ends."""
    of_namespace = vars(torch.ops.narrowcast)
    if "_library" in of_namespace:
        end_library(of_namespace.pop("_library"))
    of_namespace["_library"] = torch.library.Library("narrowcast", "DEF")
    return of_namespace["_library"]


_LIBRARY = _library()

QUANTIZER = opaque.schema_type(QuantizerValue) if opaque.AVAILABLE else "Any"


_DEFINED: dict[str, str] = {}  # schemas by name


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
    dissolved: Callable[..., bool] | None = None,
    lowered: Callable[..., bool] | None = None,
    shared: bool = False,
    of_state: bool = False,
) -> Callable[..., Any]:
    """Define ``narrowcast::<schema>`` and return its default overload.

    Where its tensors are of static shape and on a GPU, and ``lowered``, given its arguments, says so, a compiled graph
    launches what the implementation launches instead of the operator; see :mod:`.lowering`. ``dissolved``: the same
    from functionalization on, for what the compiler's passes should see, as they should GEMMs, and for operators that
    write to arguments. ``shared``: calls with the same arguments are one in a graph, for operators whose outputs are
    never written and no graph returns. ``of_state``: its tensors are a layer's state and never have gradients, so that
    it does not matter whether any are recorded.

    One implementation serves CPU and CUDA tensors: it picks reference or kernels from the device. Outputs must alias
    neither an input nor each other, and the fake's strides must be the real ones; the compiler relies on both.
    What is returned calls the overload, unless other code could observe the call; see
    :func:`_with_shortcut`.
    Without the opaque-object API an operator that takes a quantizer is its plain Python implementation, and raises in
    a graph.
    """
    if not opaque.AVAILABLE and QUANTIZER in schema:
        return _refused_in_graphs(implementation)
    name = schema.split("(", 1)[0]
    if (
        _DEFINED.get(name) == schema
    ):  # its module is reloaded, as in notebooks; a library takes an operator once
        return _with_shortcut(getattr(torch.ops.narrowcast, name), implementation, of_state)
    _DEFINED[name] = schema
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    overload = getattr(torch.ops.narrowcast, name).default
    unseen = _without_autocast(implementation, _amaxes_at(overload))
    _LIBRARY.impl(name, unseen, "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowcast::{name}", _all_on_meta(name, fake), lib=_LIBRARY)
    if lowered is not None:
        RULES[overload] = Rule(_without_autocast(implementation), lowered, _amaxes_at(overload))
    rules = {
        FunctionalMode: _in_graph(implementation, dissolved, shared),
        Recording: _recorded(implementation),
    }
    for mode, of_mode in rules.items():
        torch.library.register_torch_dispatch(f"narrowcast::{name}", mode, of_mode, lib=_LIBRARY)
    if QUANTIZER in schema or "ScalarType" in schema:
        _define_text_overload(name, schema, implementation, fake, tags)
    return _with_shortcut(getattr(torch.ops.narrowcast, name), implementation, of_state)


_DIFFERENTIABLE: set[str] = set()


def give_backward(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Register the backward of ``narrowcast::<name>``, once: PyTorch refuses a second, also of a reloaded module."""
    if name not in _DIFFERENTIABLE:
        _DIFFERENTIABLE.add(name)
        torch.library.register_autograd(
            f"narrowcast::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )


def _refused_in_graphs(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``implementation`` for eager code; the trace of a graph ends with an error, also without ``fullgraph``."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        while_tracing(_refuse_while_tracing)
        return implementation(*args)

    return run


def _refuse_while_tracing(_: Any) -> None:
    raise opaque.missing()


def _define_text_overload(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...],
) -> None:
    """Define ``<name>.text``, the operator with quantizers as text, which files of programs can hold.

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
    unseen = _without_autocast(run, _amaxes_at(getattr(torch.ops.narrowcast, name).text))
    _LIBRARY.impl(f"{name}.text", _without_gradients(unseen), "CompositeExplicitAutograd")
    torch.library.register_fake(full_name, _all_on_meta(name, with_values(fake)), lib=_LIBRARY)
    torch.library.register_torch_dispatch(
        full_name, FunctionalMode, _in_graph(run, None, shared=False), lib=_LIBRARY
    )


def _without_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs an operator of an exported program, whose graph has lost the autograd functions around it."""

    def refuse_gradients(*args: Any) -> Any:
        if torch.is_grad_enabled():
            trained = next((x for x in tensors_among(args) if x.requires_grad), None)
            if trained is not None:
                raise RuntimeError(
                    f"an exported program has no gradients, and a tensor of shape {tuple(trained.shape)} requires one; "
                    "run the program under torch.no_grad(), or call model.requires_grad_(False) before torch.export; "
                    "train the model itself"
                )
        with torch.no_grad():
            return run(*args)

    return refuse_gradients


def _readers(overload: Any) -> dict[int, Callable[[str], Any]]:
    """Map the positions of arguments that are text only in ``<name>.text`` to their readers."""
    names = [argument.name for argument in schema_of(overload).arguments]
    kinds = {"quantizer": quantizer_of_text, "dtype": functools.partial(getattr, torch)}
    return {i: read for i, name in enumerate(names) for kind, read in kinds.items() if name.endswith(kind)}


def _text_of(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value._value_text()


def _all_on_meta(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake that refuses tensors of which only some are on the meta device: real ones would get memory
    unwritten.
    """

    @functools.wraps(fake)
    def run(*args: Any, **kwargs: Any) -> Any:
        kinds = {tensor.device.type for tensor in tensors_among(args)}
        if len(kinds) > 1 and "meta" in kinds:
            raise RuntimeError(
                f"narrowcast::{name} got tensors on {' and '.join(sorted(kinds))}; make those on the meta device real, "
                "with to_empty and reset_parameters or load_state_dict(assign=True), or put all of them there"
            )
        if forward_level() >= 0:
            _refuse_tangents(args)
        if is_tracer_running():
            _check_values(args)
            # the text of a quantizer says it, too, and not every operator has one
            mark_cacheable(rules_of_graphs())
        return fake(*args, **kwargs)

    return run


_PLAIN_ALONE = frozenset(PLAIN)
_PLAIN_OR_NONE = _PLAIN_ALONE | {type(None)}


def _with_shortcut(
    packet: Any, implementation: Callable[..., Any], of_state: bool = False
) -> Callable[..., Any]:
    """Return the default overload, without the way through the dispatcher where that leads straight to
    ``implementation``.

    So it does for plain CUDA tensors in eager code that records no gradient: inside the autograd functions; and for
    state, which has none. It would cost as much as launching a kernel does. Traces, dispatch modes and the profiler do
    see the overload, and so does a tensor of any other type, in whichever place: a kernel would read at the address 0,
    which is all the memory that a quantized tensor has of its own. A graph that is exported holds the overload
    ``text``, if there is one.
    """
    overload = packet.default
    as_text = getattr(packet, "text", overload)
    texts_at = () if as_text is overload else tuple(_readers(overload))
    arguments = schema_of(overload).arguments
    first = next((i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)), None)
    if first is None:
        return overload  # type: ignore[no-any-return]
    in_list = "List" in str(arguments[first].type)
    lists = [i for i, argument in enumerate(arguments) if str(argument.type) == "List[Tensor]"]
    others = [
        i
        for i, argument in enumerate(arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]") and i != first
    ]
    run = _without_autocast(implementation)
    written = [i for i, argument in enumerate(arguments) if argument.alias_info is not None]

    def with_texts(args: tuple[Any, ...]) -> Any:
        return as_text(*[_text_of(arg) if i in texts_at else arg for i, arg in enumerate(args)])

    def call(*args: Any) -> Any:
        if is_dynamo_compiling():  # here, as every line of a trace costs
            return with_texts(args) if is_exporting() else overload(*args)
        route = eager_watcher(of_state).operator
        if route == TEXT:
            return with_texts(args)
        if route == DISPATCHED:
            return overload(*args)
        x: Any = args[first]
        if in_list:
            x = x[0] if x else None
        if type(x) not in PLAIN or not x.is_cuda:
            return overload(*args)
        given = len(args)
        for i in others:
            if i < given and type(args[i]) not in _PLAIN_OR_NONE:
                return overload(*args)
        for i in lists:
            if i < given and not _PLAIN_ALONE.issuperset(map(type, args[i])):
                return overload(*args)
        result = (implementation if route == SHORTCUT else run)(*args)
        for i in written:  # as the dispatcher does for saved tensors to be found out of date
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])
        return result

    call.__doc__ = implementation.__doc__
    return call


def _in_graph(
    implementation: Callable[..., Any],
    dissolved: Callable[..., bool] | None,
    shared: bool,
) -> Callable[..., Any]:
    """Return the rule by which functionalization meets an operator: trace its implementation, or keep it whole.

    Traced, its GEMMs and kernel launches are the graph's own: the compiler allocates for them, plans their memory and
    starts them from the code it generates, where an operator is a call into Python at every step. Of what is kept whole
    Inductor lowers all but operators on a CPU, of dynamic shapes, in a graph to export, and all of them under
    ``NARROWCAST_INLINE=0``.
    """
    run = _without_autocast(implementation)

    def rule(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        _check_values(given)
        if watcher_in_graph(mode, given, dissolved).operator == WHOLE:
            register_rules()
            return once(mode, given, lambda: mode.__torch_dispatch__(op, types, args, kwargs))
        start_kernels_statically()
        with mode:
            return once(mode, given, lambda: run(*args, **(kwargs or {})))

    def once(mode: Any, given: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Return the outputs of an earlier call of this graph on the same values, if the operator is shared."""
        if not shared or not is_static_on_gpu(given):  # symbols have no identity
            return call()
        results = vars(mode).setdefault("_narrowcast_results", {})  # as long as the trace
        key = (implementation, get_proxy_mode(), *(_identity(value) for value in given))
        if key not in results:
            # with the arguments, so that they live on and no other takes over their identity
            results[key] = (call(), given)
        return [*results[key][0]]

    return rule


def _check_values(given: Iterable[Any]) -> None:
    """Refuse quantizers that no graph can hold, such as that of a tensor which the graph was given.

    Raises:
        NotInGraph: there is one. Dynamo ends its graph there and runs the operator in eager code.
    """
    for value in given:
        if isinstance(value, QuantizerValue) and not value._value_text():
            raise NotInGraph(value._not_a_value())


def _recorded(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule by which a recording meets an operator: it notes what the implementation does."""

    def rule(mode: Recording, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, QuantizerValue) and not arg._is_ours() for arg in args):
            mode.refuse()  # a user's code may depend on anything
        with mode:
            result = implementation(*args, **(kwargs or {}))
            for argument, value in zip(schema_of(op).arguments, args):
                if argument.alias_info is not None and value is not None:
                    mode.written(value)
        return result

    return rule


def _identity(value: Any) -> Any:
    """Return the equal for the same value in a trace: of tensors the same part of the same storage, not written to in
    between.
    """
    if not isinstance(value, FunctionalTensor):
        return value
    return (*state_key(value), value.dtype, tuple(value.shape), value.stride(), value.storage_offset())


def always(*_: Any) -> bool:
    """For ``lowered`` and ``dissolved``: wherever shapes and devices allow."""
    return True


def _amaxes_at(overload: Any) -> tuple[int, ...]:
    """Return the positions of amaxes to which an operator writes without declaring it."""
    arguments = schema_of(overload).arguments
    return tuple(i for i, a in enumerate(arguments) if a.name in _AMAXES and a.alias_info is None)


_AMAXES = ("amax", "amaxes")


def _without_autocast(
    implementation: Callable[..., Any], amaxes_at: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """An ambient torch.autocast must not reach into the numerics: their matrix products are fp32 on purpose.

    Args:
        amaxes_at: positions of amaxes, whose version counters do not count what is written: a maximum.
    Raises:
        NotImplementedError: a tensor has a tangent, which PyTorch would drop.
    """

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_level() >= 0:
            _refuse_tangents(args)
        for at in amaxes_at:
            if at < len(args) and args[at] is not None:
                amax = args[at]
                amax = [one.data for one in amax] if type(amax) is list else amax.data
                args = (*args[:at], amax, *args[at + 1 :])
        with autocast_off():
            return implementation(*args, **kwargs)

    return run


def _refuse_tangents(args: tuple[Any, ...]) -> None:
    """Refuse what PyTorch computes without tangents, in silence, as autograd does not know it."""
    if has_tangent(tensors_among(args)):
        raise NotImplementedError(
            "an operator of narrowcast got a tensor with a tangent (torch.func.jvp, a dual tensor), and has no "
            "derivative in forward mode; use reverse mode, as torch.autograd.grad, or a layer of torch.nn here"
        )
