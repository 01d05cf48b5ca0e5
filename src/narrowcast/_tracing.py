"""What must be done for real while the compiler traces: state to be made, values to be remembered.

Traced code cannot make a buffer (it would be a result of the graph) nor keep a value (a graph must not depend on what
it wrote). ``torch._dynamo.comptime`` runs a function at that very point of the trace, on the real objects; what the
traced code reads next is what that function left, guarded as if it had always been there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any


def traced_local(context: Any, name: str) -> Any:
    """The object that a local variable of the traced function stands for; an equal one for a value made in the graph.

    None where that has parts that are no constants.
    """
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    if hasattr(variable, "realize"):
        variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if getattr(variable, "source", None) is not None:
        return variable.value
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    kind: Any = variable.python_type()
    with contextlib.suppress(NotImplementedError):
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            parts = [variable.var_getattr(translator, part).as_python_constant() for part in names]
            return kind(**dict(zip(names, parts)))
    return None
