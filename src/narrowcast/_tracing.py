"""What must be done for real while the compiler traces: state to be made, values to be remembered.

Traced code cannot make a buffer (it would be a result of the graph) nor keep a value (a graph must not depend on what
it wrote). ``torch._dynamo.comptime`` runs a function at that very point of the trace, on the real objects; what the
traced code reads next is what that function left, guarded as if it had always been there.
"""

from __future__ import annotations

from typing import Any

MADE_IN_GRAPH: Any = object()
"""Stands for an object that exists only in the graph."""


def traced_local(context: Any, name: str) -> Any:
    """The object that a local variable of the traced function stands for, or :data:`MADE_IN_GRAPH`."""
    return _real(context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker())


def _real(variable: Any) -> Any:
    if hasattr(variable, "realize"):
        variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if isinstance(
        getattr(variable, "items", None), list
    ):  # a tuple or list that the traced code put together
        return [_real(item) for item in variable.items]
    if hasattr(variable, "get_function"):
        return variable.get_function()
    return variable.value if getattr(variable, "source", None) is not None else MADE_IN_GRAPH
