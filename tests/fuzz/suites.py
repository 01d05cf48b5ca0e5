"""The suites, and their shares of the time."""

from __future__ import annotations

from . import (
    chains,
    classes,
    compiled,
    converted,
    cycles,
    encodings,
    graphs,
    histories,
    masks,
    observed,
    operands,
    options,
    orders,
    products,
    ranks_drawn,
    recipes_drawn,
    resume,
    routing,
    semantics,
    special,
    updates,
)
from .runner import Suite


def all_suites() -> list[Suite]:
    """Fresh records of every suite."""
    return [
        Suite("histories", histories.run, 8.0, histories.draw),
        Suite("orders", histories.run, 2.0, orders.draw),
        Suite("graphs", histories.run, 2.0, graphs.draw),
        Suite("observed", observed.run, 3.0, observed.draw),
        Suite("chains", chains.run, 1.0, chains.draw),
        Suite("updates", updates.run, 1.0, updates.draw),
        Suite("masks", masks.run, 0.5, masks.draw),
        Suite("routing", routing.run, 0.5, routing.draw),
        Suite("recipes", recipes_drawn.run, 0.5, recipes_drawn.draw),
        Suite("operands", operands.run, 1.0, operands.draw),
        Suite("converted", converted.run, 0.5, converted.draw),
        Suite("ranks", ranks_drawn.run, 1.0, ranks_drawn.draw),
        Suite("classes", classes.run, 1.0, classes.draw),
        Suite("products", products.case, 3.0),
        Suite("encodings", encodings.case, 2.0),
        Suite("special", special.case, 1.0),
        Suite("semantics", semantics.case, 2.0),
        Suite("options", options.case, 1.0),
        Suite("compiled", compiled.case, 2.0),
        Suite("cycles", cycles.case, 1.0),
        Suite("resume", resume.case, 1.0),
    ]
