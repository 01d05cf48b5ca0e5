"""``LinearPlan``: what a linear layer does under a recipe, resolved once and remembered on the recipe.

A recipe answers questions: how to quantize this operand, whether to accumulate in fp32, what to save. A layer would
have to ask about ten of them in each forward, in eager and in traced code. A plan is all answers at once, as one
frozen value, for one layer name and the requested gradients. It is an attribute of the recipe object, whose
name is what the plan depends on, and the recipe is sealed by it: it cannot change any more, so the plan cannot become
wrong, and it goes when the recipe goes. To the compiler it is a constant. A trace cannot set an attribute on an
object from outside, so ``linear_plan`` leaves the trace for a moment to do it (``_tracing.py``), and then reads what
it finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from .._determinism import DETERMINISM, PROCESSES
from .._tracing import give_key, refuse_in_one_graph, traced_local, while_tracing
from ..quantizers import IdentityQuantizer, Operand, Quantizer
from ..roles import QuantizerRole
from .base import remember
from .delayed import resolve_both

if TYPE_CHECKING:
    from .base import Recipe
    from .delayed import DelayedScaling

SMALL_WEIGHT = 1 << 17
"""Elements up to which a weight is quantized once for both of its GEMMs: one more launch in the backward would take
longer than what it does, and what is saved is a byte per element."""


_IDENTITY = Operand.of(IdentityQuantizer())


def _identity() -> Operand:
    return _IDENTITY


@dataclass(frozen=True)
class LinearPlan:
    """The work of a linear layer under a recipe for the requested gradients: a constant of the graph.

    ``needs_input``, ``needs_weight``: which gradients the backward makes. ``quantized`` False: everything in high
    precision, and the operands do not matter. ``input``, ``weight``, ``grad_output``: how the operands of the three
    GEMMs are quantized, in the directions that will be read. ``dgrad_weight``: column-wise alone, for a backward that
    quantizes the weight once more, so that nothing but the parameter is saved; None if that would not give the same
    codes, or there is no such backward. ``kept_weight``: in both directions, for a weight that serves
    several microbatches. ``original_input``: column-wise alone, for a backward that quantizes the input again
    (``save_original_input``). ``output``, ``grad_input``: what the layer hands to its neighbors. ``delayed``: the
    delayed scaling that renews the layer's state; None if it keeps none.
    ``eager_only``: why it cannot be part of a graph, "" where it can. ``batch_invariant``: not 0 if a row of the output
    has the same bits in every batch, and then on so many processes (:func:`narrowcast.set_deterministic`).
    ``weight_once``: the plan with ``kept_weight`` instead of ``weight`` and ``dgrad_weight``, where these differ: for
    small weights, and few rows of grouped layers.
    ``saves_codes``: a norm or an activation before the layer keeps its input for the backward in codes. ``few_rows``:
    up to how many rows the GEMM quantizes them itself; 0 if a gradient is requested, too.
    """

    needs_input: bool
    needs_weight: bool
    quantized: bool
    backward_override: str | None
    input: Operand = field(default_factory=_identity)  # a graph takes no object as a default
    weight: Operand = field(default_factory=_identity)
    dgrad_weight: Operand | None = None
    grad_output: Operand = field(default_factory=_identity)
    kept_weight: Operand = field(default_factory=_identity)
    original_input: Operand = field(default_factory=_identity)
    output: Operand = field(default_factory=_identity)
    grad_input: Operand = field(default_factory=_identity)
    emulate: bool = False
    fast_fprop: bool = False
    fast_dgrad: bool = False
    fast_wgrad: bool = False
    save_original_input: bool = False
    delayed: DelayedScaling | None = None
    eager_only: str = ""
    batch_invariant: int = 0
    saves_codes: bool = False
    few_rows: int = 0
    weight_once: LinearPlan | None = None

    key: ClassVar[str] = ""  # for graphs; a trace gives it

    def __hash__(self) -> int:
        # in less time than that of every field; == tells apart what it does not
        operands = self.input.value, self.weight.value, self.grad_output.value
        wanted = self.needs_input, self.needs_weight, self.batch_invariant
        return hash((*wanted, self.backward_override, operands))


def linear_plan(
    recipe: Recipe | None,
    name: str,
    needs_input: bool,
    needs_weight: bool,
    save_original_input: bool = False,
    hands_over: bool = False,
    *,
    module_type: str,
    weight_elements: int | None = None,
    joins: bool = False,
) -> LinearPlan:
    """Return the plan of a linear layer: built once, then read off the recipe.

    Args:
        recipe: None for high precision.
        name: of the layer, in the quantizer roles of a custom recipe.
        needs_input, needs_weight: which gradients the backward makes.
        save_original_input: keep the input as it is for the backward. Where a custom recipe scales it with delay, the
            plan says that it is not done.
        hands_over: the layer quantizes its output or the gradient of its input.
        module_type: of the layer, in those roles, too: "linear" or "grouped_linear".
        weight_elements: how many the weight has; those of a small one are quantized once. None: never once.
        joins: ranks join their codes, as the parts of one tensor.
    Raises:
        ValueError: ``save_original_input`` under delayed scaling, what a custom recipe's factory returned, operands of
            a grouped layer that are rotated in different ways, or in the batch-invariant mode a recipe that scales a
            row by other rows.
    """
    batch_invariant = DETERMINISM.batch_invariant
    # a graph that was broken may hold symbols for these, which a branch, but no product, makes values of
    bits = (8 if needs_input else 0) + (4 if needs_weight else 0)
    bits += (2 if save_original_input else 0) + (1 if hands_over else 0) + (16 if joins else 0)
    flags = _FLAGS[batch_invariant][bits]
    if recipe is None:
        return _IN_HIGH_PRECISION[flags]
    key = flags + module_type
    if recipe._plans_by_name:
        key += name.replace("_", "__").replace(".", "_d")  # the compiler takes no dots in an attribute
    compiling = while_tracing(_remember_while_tracing)
    plan = getattr(recipe, key, None)
    if plan is None:
        wanted = needs_input, needs_weight, save_original_input, hands_over
        plan = _build(recipe, name, *wanted, module_type, batch_invariant, joins)
        if not compiling:
            remember(recipe, key, plan)
    if weight_elements is not None and weight_elements <= SMALL_WEIGHT:
        return plan.weight_once or plan
    return plan


def _remember_while_tracing(context: Any) -> None:
    recipe, key = traced_local(context, "recipe"), traced_local(context, "key")
    if recipe is None:
        return
    if not hasattr(recipe, key):
        names = ("name", "needs_input", "needs_weight", "save_original_input", "hands_over", "module_type")
        names += ("batch_invariant", "joins")
        # traced code runs into the same error, and raises it where the user sees it
        with contextlib.suppress(Exception):
            remember(recipe, key, _build(recipe, *(traced_local(context, name) for name in names)))
    plan = getattr(recipe, key, None)
    if plan is None:
        return
    for one in filter(None, (plan, plan.weight_once)):
        if not one.key:
            give_key(one, _text(one))
    if plan.eager_only:
        refuse_in_one_graph(context, plan.eager_only)


def _build(
    recipe: Recipe,
    name: str,
    needs_input: bool,
    needs_weight: bool,
    save_original_input: bool,
    hands_over: bool,
    module_type: str,
    batch_invariant: int,
    joins: bool,
) -> LinearPlan:
    kinds = (("input", "weight", "output"), ("grad_output", "grad_input"))
    if not hands_over:
        kinds = (("input", "weight"), ("grad_output",))
    roles = [[QuantizerRole(module_type, kind, name) for kind in some] for some in kinds]
    forward, backward, delayed = resolve_both(recipe, roles[0], roles[1], joins or batch_invariant > 0)
    override = recipe.backward_override
    inp, weight, grad = *forward[:2], backward[0]
    if batch_invariant:
        _check_rows_alone(recipe, inp)
    if save_original_input and inp._is_delayed():
        if recipe.delayed():
            raise ValueError(
                "save_original_input=True does not work with DelayedScaling, whose scale moves between forward and "
                "backward; use another recipe or save_original_input=False"
            )
        save_original_input = False
    wgrad, dgrad = needs_weight and override is None, needs_input and override is None
    if module_type == "grouped_linear":
        _check_rotations(recipe, (inp, grad) if wgrad else (), weight if dgrad else None)
    repeatable = dgrad and not weight._is_stochastic()
    plan = LinearPlan(
        needs_input=needs_input,
        needs_weight=needs_weight,
        quantized=True,
        backward_override=override,
        input=Operand.of(inp, True, wgrad and not save_original_input),
        weight=Operand.of(weight, True, dgrad and not repeatable),
        dgrad_weight=Operand.of(weight, False, True) if repeatable else None,
        grad_output=Operand.of(grad, needs_input or not needs_weight, needs_weight),
        kept_weight=Operand.of(weight),
        original_input=Operand.of(inp, False, True),
        output=Operand.of(forward[2]) if hands_over else _IDENTITY,
        grad_input=Operand.of(backward[1]) if hands_over else _IDENTITY,
        emulate=recipe.emulate,
        fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
        fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
        fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
        save_original_input=save_original_input,
        saves_codes=recipe.saved_activations == "fp8",
        delayed=delayed,
        eager_only=eager_only([inp, weight, grad, *forward[2:], *backward[1:]]),
        batch_invariant=batch_invariant,
        few_rows=0 if needs_input or needs_weight or batch_invariant else _few_rows(recipe, inp),
    )
    if not repeatable:
        return plan
    return replace(plan, weight_once=replace(plan, weight=plan.kept_weight, dgrad_weight=None))


def _few_rows(recipe: Recipe, inp: Quantizer) -> int:
    """Return up to how many rows the GEMM quantizes its input itself."""
    prologue = inp._prologue()
    return 0 if prologue is None or recipe.emulate else prologue.rows


def _check_rotations(recipe: Recipe, of_wgrad: tuple[Quantizer, ...], weight: Quantizer | None) -> None:
    """Check that rotations cancel in the products of groups; :func:`narrowcast.functional.gemm` undoes what does not.

    Args:
        of_wgrad: the quantizers of its operands, or none. weight: that of dgrad's, or None.
    Raises:
        ValueError: they do not.
    """
    alike = len({quantizer._rotation(True) for quantizer in of_wgrad}) <= 1
    if not alike or (weight is not None and weight._rotation(True) is not None):
        raise ValueError(
            f"{type(recipe).__name__} rotates the operands of a grouped layer in different ways; give the quantizers "
            "of inputs and gradients the same with_rht and with_random_sign_mask, and those of weights with_rht=False"
        )


def _check_rows_alone(recipe: Recipe, quantizer: Quantizer) -> None:
    """Check that each row of an input is quantized by itself.

    Raises:
        ValueError: other rows change its codes.
    """
    if quantizer._spans_rows() or quantizer._is_stochastic():
        raise ValueError(
            f"{type(recipe).__name__} quantizes a row of the input by {type(quantizer).__name__}, whose result depends "
            "on the rows beside it; in the batch-invariant mode use Float8BlockScaling, MXFP8BlockScaling, "
            "DelayedScaling, or NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)"
        )


def eager_only(quantizers: Iterable[Quantizer]) -> str:
    """Return why code with these quantizers cannot be part of a graph: the first that the compiler does not know; else
    "".
    """
    for quantizer in quantizers:
        if not quantizer._te_compile_value_opaque:
            return quantizer._not_a_value()
    return ""


def _text(plan: LinearPlan) -> str:
    """Return what an autograd function reads of a plan as text; "" where a quantizer is a user's, of any code."""
    texts = []
    for one in fields(plan):
        value = getattr(plan, one.name)
        quantizers = (value.quantizer, value.shared) if isinstance(value, Operand) else ()
        if not all(quantizer is None or quantizer._is_ours() for quantizer in quantizers):
            return ""
        if one.name not in ("delayed", "weight_once"):  # these are for the layer
            texts.append((one.name, value))
    return repr(texts)


# processes of the batch-invariant mode; needs_input, needs_weight, save_original_input, hands_over
_FLAGS = {most: tuple(f"_plan_{most}_{bits:05b}_" for bits in range(32)) for most in (0, *PROCESSES)}
_IN_HIGH_PRECISION = {
    flags: LinearPlan(
        bool(bits & 8),
        bool(bits & 4),
        quantized=False,
        backward_override="high_precision",
        batch_invariant=most,
    )
    for most, names in _FLAGS.items()
    for bits, flags in enumerate(names)
}
for _plan in _IN_HIGH_PRECISION.values():
    give_key(_plan, _text(_plan))
