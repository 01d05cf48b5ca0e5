"""The lowering of an operator: a compiled graph gets the launches of its implementation when Inductor lowers it.

Until then the graph holds the operator, so that no pass before goes through a node for each launch and allocation.
Equal calls in one graph, as those of equal layers, are traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..kernels.graph_amax import Maxima, is_whole, lowering
from ..upstream.compiler import start_kernels_statically
from ..upstream.lowering import Call, fakes_of, hear_writes, is_inductor_loaded, register, tell_writes, trace
from ..upstream.tensors import storage_key, tree_leaves, tree_map_only
from .routes import LOWERED, watcher_of_lowering


class Launches(NamedTuple):
    """What equal calls of an operator launch.

    Args:
        graph: takes the tensors among the arguments, then the maxima that are known of some. Returns the results, then
            maxima of some.
        made: the places of those among the results.
        asked: the operator asked for an amax.
    """

    graph: fx.Graph
    made: list[int]
    asked: bool


class Rule:
    """The rule by which Inductor meets an operator.

    Args:
        implementation: of the operator. Of its arguments it writes to those at ``amaxes`` alone.
        lowered: given the arguments, whose tensors are of static shape and on a GPU, says whether a graph takes what
            the implementation launches.
    """

    def __init__(
        self, implementation: Callable[..., Any], lowered: Callable[..., bool], amaxes: tuple[int, ...]
    ) -> None:
        self.implementation, self.lowered, self.amaxes = implementation, lowered, amaxes

    def __call__(self, call: Call) -> Any:
        if watcher_of_lowering(call.given, self.lowered).operator != LOWERED:
            return call.keep_whole()
        traced, maxima = call.kept.setdefault("traced", {}), call.kept.setdefault("maxima", {})
        names = [call.memory(value) for value in call.values]
        known = {place: maxima[name] for place, name in enumerate(names) if name in maxima}
        fakes = {place: fake for place, (fake, _) in known.items()}
        wanted = bool(call.kept.get("wanted"))
        key = (self, _kind([call.given, *fakes.items()]), wanted)
        if key not in traced:
            traced[key] = self.launches(call.given, fakes, wanted)
        graph, made, asked = traced[key]
        call.kept["wanted"] = wanted or asked
        results, taken = call.run(graph, [*call.values, *(value for _, value in known.values())])
        of_results = tree_leaves(results)
        _, of_taken = fakes_of(graph.output_node().args[0])
        for place, fake, value in zip(made, of_taken, taken, strict=True):
            maxima[call.memory(of_results[place])] = fake, value
        return results

    def launches(
        self, given: tuple[Any, ...], known: dict[int, Tensor] | None = None, wanted: bool = False
    ) -> Launches:
        """Return what a call launches.

        Args:
            given: the arguments, with fake tensors.
            known: maxima of the tensors at these places among them.
            wanted: as of :class:`Maxima`.
        """
        known = known or {}
        scope, made = Maxima(wanted), list[int]()
        fakes = [x for x in tree_leaves(given) if isinstance(x, Tensor)]

        def run(*tensors: Tensor) -> Any:
            scope.given = list(zip((tensors[place] for place in known), tensors[len(fakes) :]))
            rest = iter(tensors)
            with lowering(scope):
                results = self.implementation(*tree_map_only(Tensor, lambda _: next(rest), given))
            taken = []
            for place, result in enumerate(tree_leaves(results)):
                of_result = [maxima for whole, maxima in scope.made if is_whole(result, whole)]
                made.extend([place] * len(of_result))
                taken += of_result
            return results, taken

        graph = trace(run, [*fakes, *known.values()])
        amaxes = [
            x for x in tree_leaves([given[at] for at in self.amaxes if at < len(given)]) if x is not None
        ]
        tell_writes(graph, {*map(storage_key, (*fakes, *known.values()))} - {*map(storage_key, amaxes)})
        return Launches(graph, made, scope.asked)


def _kind(value: Any) -> Hashable:
    """Return what is equal for arguments of which a trace makes the same graph."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.device
    if isinstance(value, (list, tuple)):
        return tuple(_kind(one) for one in value)
    return type(value), repr(value) if isinstance(value, float) else value  # 0.0 is equal to -0.0


RULES: dict[Any, Rule] = {}
"""By operator."""

_registered: set[Any] = set()


def register_rules() -> None:
    """Give Inductor, where it was loaded, the rules that it has not got."""
    if len(_registered) < len(RULES) and is_inductor_loaded():
        start_kernels_statically()
        hear_writes()
        for overload in RULES.keys() - _registered:
            register(overload, RULES[overload])
        _registered.update(RULES)
