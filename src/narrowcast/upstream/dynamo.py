"""Dynamo: code that runs for real while it traces, and what it knows of the traced code's variables.

Importing this file loads Dynamo, which takes seconds, so it is imported only where something is compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from .private import Absent, entry, private

_AUTOCAST_WAY_OUT = (
    "give the layers their own recipe (narrowcast.set_recipe), or enter autocast around the checkpoint"
)
_NOT_COMPILED = "run the model without torch.compile on this release"

_comptime = private("torch._dynamo.comptime.comptime", without=_NOT_COMPILED)


def __getattr__(name: str) -> Any:
    """Return ``comptime``, which runs ``comptime(function)`` in traced code for real as ``function(context)``.

    A lookup that runs for real, so that its loss ends the trace. An exception in traced code would end the graph, and
    without ``fullgraph`` the layers would run in eager code in silence.
    """
    if name != "comptime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if isinstance(_comptime, Absent):
        _comptime()
    return _comptime


_NEEDED_OF_VARIABLES = [
    private(f"torch._dynamo.{name}", follows=f"torch/_dynamo/{follows}", without=_NOT_COMPILED)
    for name, follows in (
        ("comptime.ComptimeContext.get_local", "comptime.py"),
        ("comptime.ComptimeVar._i_will_not_complain_if_bc_breaks_VariableTracker", "comptime.py"),
        ("comptime.ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator", "comptime.py"),
        ("variables.lazy.LazyVariableTracker.realize", "variables/lazy.py"),
        ("variables.base.VariableTracker.is_python_constant", "variables/base.py"),
        ("variables.base.VariableTracker.as_python_constant", "variables/base.py"),
        ("variables.base.VariableTracker.python_type", "variables/base.py"),
        ("variables.functions.UserFunctionVariable.get_function", "variables/functions.py"),
    )
]
_NEEDED_OF_GUARDS = {
    name: private(
        f"torch._dynamo.{name}", follows=f"torch/_dynamo/{name.split('.')[0]}.py", without=_NOT_COMPILED
    )
    for name in (
        "guards.install_guard",
        "guards.GuardBuilder.EQUALS_MATCH",
        "source.ImportSource",
        "source.AttrSource",
        "source.CallFunctionNoArgsSource",
    )
}
_ListVariable = private("torch._dynamo.variables.lists.BaseListVariable", without=_NOT_COMPILED)
_FIELD_READERS = [
    name
    for name, tried in (("var_getattr", "2.11-2.13"), ("tp_getattro_impl", "2.14-"))
    if private(
        f"torch._dynamo.variables.base.VariableTracker.{name}",
        follows="torch/_dynamo/variables/base.py; renamed in 2.14",
        without="the other of var_getattr and tp_getattro_impl is called",
        fallback=None,
        tried=tried,
    )
]
_FIELD = entry(
    "VariableTracker's attribute reader (var_getattr, tp_getattro_impl)",
    follows="torch/_dynamo/variables/base.py",
    without="build recipes outside of the compiled function",
)
_SOURCE = entry(
    "VariableTracker.source",
    follows="torch/_dynamo/variables/base.py",
    without=_NOT_COMPILED,
)
Unsupported: type[RuntimeError] = private(
    "torch._dynamo.exc.Unsupported",
    without="a RuntimeError is raised, which Dynamo reports with the same text",
    fallback=RuntimeError,
)
_ONE_GRAPH = entry(
    "InstructionTranslator.one_graph",
    follows="torch/_dynamo/symbolic_convert.py",
    without=_NOT_COMPILED,
)
_ROOT = entry(
    "InstructionTranslator.output.root_tx.f_code",
    follows="torch/_dynamo/output_graph.py",
    without=_AUTOCAST_WAY_OUT,
)
_TRACER = entry(
    "InstructionTranslator.output.current_tracer.parent",
    follows="torch/_dynamo/output_graph.py",
    without=_AUTOCAST_WAY_OUT,
)
_SIDE_EFFECTS = entry(
    "SubgraphTracer.allow_side_effects_in_hop",
    follows="torch/_dynamo/side_effects.py",
    without=_AUTOCAST_WAY_OUT,
    tried="2.13-",
)


def traced_local(context: Any, name: str, frames_up: int = 0) -> Any:
    """Return the object that a local variable of the traced function stands for.

    Args:
        context: what ``comptime`` gives its function.
        name: of the variable.
        frames_up: how many calls of the traced code to go up from that of ``comptime``.
    Returns:
        The object; of a record made in the graph, an equal one. None if that has parts which are neither constants
        nor found outside the graph, and if the frame is not traced.
    """
    for needed in (*_NEEDED_OF_VARIABLES, _ListVariable):
        if isinstance(needed, Absent):
            needed()
    try:
        local = context.get_local(name, stacklevel=frames_up)
    except (
        AttributeError
    ):  # between graphs, Dynamo traces the function that called comptime as a frame of its own
        return None
    variable = local._i_will_not_complain_if_bc_breaks_VariableTracker()
    with contextlib.suppress(NotImplementedError):
        return _object_of(variable, _translator(context))
    return None


def _translator(context: Any) -> Any:
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator()


def _object_of(variable: Any, translator: Any) -> Any:
    if hasattr(variable, "realize"):
        variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if isinstance(variable, _ListVariable):  # a tuple or list that the traced code put together
        return [_object_of(item, translator) for item in variable.items]
    # a number that differed between calls: the graph is then for this one
    if hasattr(variable, "evaluate_expr"):
        return variable.evaluate_expr()
    if hasattr(variable, "get_function"):
        return variable.get_function()
    if not hasattr(variable, "source"):
        raise _SOURCE.error(f"{type(variable).__name__} without it")
    if variable.source is not None:
        return variable.value
    kind: Any = variable.python_type()
    if not hasattr(kind, "__dataclass_fields__"):
        raise NotImplementedError
    read_field = next((getattr(variable, n) for n in _FIELD_READERS if hasattr(variable, n)), None)
    if read_field is None:
        raise _FIELD.error(f"{type(variable).__name__} without either")
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return kind(**{name: _object_of(read_field(translator, name), translator) for name in names})


def is_one_graph(context: Any) -> bool:
    """Return whether what is traced must be one graph (``fullgraph=True``)."""
    translator = _translator(context)
    if not hasattr(translator, "one_graph"):
        raise _ONE_GRAPH.error()
    return bool(translator.one_graph)


def _tracer(context: Any) -> Any:
    tracer = getattr(getattr(_translator(context), "output", None), "current_tracer", None)
    if not hasattr(tracer, "parent"):
        raise _TRACER.error()
    return tracer


def compiled_code(context: Any) -> Any:
    """Return the code of the function that is compiled: calls of it on several modules may share a graph."""
    root = getattr(getattr(_translator(context), "output", None), "root_tx", None)
    code = getattr(root, "f_code", None)
    if code is None:
        raise _ROOT.error()
    return code


def is_in_subgraph(context: Any) -> bool:
    """Return whether what is traced is inside a higher-order operator, such as a checkpoint."""
    return _tracer(context).parent is not None


def begin_side_effects(context: Any) -> None:
    """Allow traced code inside a checkpoint to write to objects from outside, until :func:`end_side_effects`."""
    tracer = _tracer(context)
    if not hasattr(tracer, "allow_side_effects_in_hop"):
        if tracer.parent is not None:
            raise _SIDE_EFFECTS.error()
        return
    tracer.allowed_before_begin = tracer.allow_side_effects_in_hop
    tracer.allow_side_effects_in_hop = True


def end_side_effects(context: Any) -> None:
    """Restore what was allowed before :func:`begin_side_effects`.

    Around a graph break the autocast is entered by eager code, and the compiler traces either call by itself.
    """
    tracer = _tracer(context)
    if hasattr(tracer, "allowed_before_begin"):
        tracer.allow_side_effects_in_hop = tracer.allowed_before_begin


def guard_on_result(function: Any) -> None:
    """Guard the graph that is being traced on what a function of a module, called without arguments, returns now."""
    install, equals, package, attribute, call = _NEEDED_OF_GUARDS.values()
    first, *names = function.__module__.split(".")
    source = functools.reduce(attribute, [*names, function.__name__], package(first))
    install(call(source).make_guard(equals))
