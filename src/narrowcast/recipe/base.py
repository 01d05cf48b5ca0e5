"""``Recipe``: what all recipes share, and the small values they are made of."""

from __future__ import annotations

import difflib
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from typing_extensions import dataclass_transform

from .. import _environment as environment
from .._checks import in_range, is_one_of, not_among, shown
from .._sealing import Sealable
from ..formats import E2M1, E2M3, E3M2, E4M3, E5M2, DType, ElementFormat, Members
from ..quantizers import Quantizer
from ..roles import QuantizerRole

if TYPE_CHECKING:
    from .delayed import DelayedScaling

BackwardOverride = Literal["high_precision", "dequantized"] | None
SavedActivations = Literal["fp8"] | None


class _Name(str):
    """Name of a format, which Transformer Engine's users ask for the largest values of forward and backward."""

    __slots__ = ()

    @property
    def max_fwd(self) -> float:
        return Format(self).max_fwd

    @property
    def max_bwd(self) -> float:
        return Format(self).max_bwd


_ELEMENTS = {element.name.upper(): element for element in (E2M1, E2M3, E3M2, E4M3, E5M2)}


class Format(enum.Enum, metaclass=Members):
    """Element formats of forward and backward tensors.

    Attributes:
        element: the element format of forward tensors.
        max_fwd: largest value of forward tensors.
        max_bwd: largest value of backward tensors.
        maxes: both.
    """

    E2M1 = _Name("E2M1")
    E2M3 = _Name("E2M3")
    E3M2 = _Name("E3M2")
    E4M3 = _Name("E4M3")
    E5M2 = _Name("E5M2")
    HYBRID = _Name("HYBRID")

    def __init__(self, name: str) -> None:
        self.element: ElementFormat = _ELEMENTS["E4M3" if name == "HYBRID" else name]
        self.max_fwd: float = self.element.max
        self.max_bwd: float = E5M2.max if name == "HYBRID" else self.element.max
        self.maxes = self.max_fwd, self.max_bwd

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"the format is {not_among(value, cls.__members__)}")


def check_flags(settings: Any, names: Sequence[str]) -> None:
    """Check fields that say yes or no: a text such as "no" would count as true.

    Raises:
        TypeError: one that is neither True nor False.
    """
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise TypeError(f"{type(settings).__name__}: {name} is {shown(value)}; use True or False")


@dataclass(frozen=True)
class MMParams:
    """Accumulation of one GEMM: with the split accumulator, or (False) with the tensor cores' fast one."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_flags(self, ("use_split_accumulator",))


@dataclass(frozen=True)
class QParams:
    """Quantization of one operand, for recipes that leave a choice.

    Attributes:
        derived: a recipe sets it from its other fields, and again when ``dataclasses.replace`` changes those.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False
    derived: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_flags(self, ("power_2_scale", "random_hadamard_transform", "stochastic_rounding"))
        check_flags(self, ("fp4_2d_quantization",))
        in_range("QParams: amax_epsilon", self.amax_epsilon, "use a finite number, at least 0")


AmaxAlgorithm = Literal["max", "most_recent"] | Callable[..., Any]
Mode = Literal["forward", "backward"]

FORWARD_TENSOR_TYPES = ("input", "weight", "output")
BACKWARD_TENSOR_TYPES = ("grad_output", "grad_input")
_TENSOR_TYPES: dict[str, tuple[str, ...]] = {
    "forward": FORWARD_TENSOR_TYPES,
    "backward": BACKWARD_TENSOR_TYPES,
}

DELAYED_SLOTS = {"input": 0, "output": 1, "grad_output": 2, "grad_input": 3}
"""Positions in a layer's state of delayed scaling."""


def tensor_type_at(mode: Mode, slot: int, role: QuantizerRole | None = None) -> str:
    """Return which operand a slot is for: the one its role names, else the one at that position of the direction."""
    if role is not None and role.tensor_type in (*FORWARD_TENSOR_TYPES, *BACKWARD_TENSOR_TYPES):
        return role.tensor_type
    kinds = _TENSOR_TYPES[mode]
    return kinds[slot % len(kinds)]


def flag_field(name: str) -> Any:
    """Return a field whose default is the environment variable ``NARROWCAST_<name>`` at creation."""
    return field(default_factory=lambda: environment.read_flag(name))


_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def recipe_class(cls: _Class) -> _Class:
    """Return a dataclass with a hash whose fields may be assigned until an instance is first used (:class:`Sealable`).

    To the compiler it is a frozen one: traced code makes and reads recipes, and never changes them.
    """
    cls = dataclass(frozen=True, repr=False)(cls)
    del cls.__setattr__, cls.__delattr__
    value_hash = cls.__hash__

    def sealing_hash(self: Any) -> int:
        self._seal()
        return value_hash(self)  # type: ignore[call-arg]

    cls.__hash__ = sealing_hash  # type: ignore[assignment]
    return cls


class HighPrecisionBlocks(NamedTuple):
    """The blocks at both ends of a model that a recipe's authors keep in high precision.

    ``first``, ``last``: how many, as shares of the model's blocks; the product is rounded. ``source``: who advises it.
    """

    first: float
    last: float
    source: str

    def keeps(self, index: int, blocks: int) -> bool:
        """Return whether the block ``index``, from 0, of as many ``blocks`` stays."""
        return index < round(self.first * blocks) or index >= blocks - round(self.last * blocks)


@recipe_class
class Recipe(Sealable):
    """Base of all recipes.

    Fields every recipe has: ``backward_override`` (None, "high_precision": backward on the original operands,
    "dequantized": backward on the dequantized row-wise operands), ``emulate`` (run on a GPU without the native
    GEMM by decoding to bf16; default from NARROWCAST_EMULATE) and ``saved_activations`` (None, "fp8": what norms and
    activations of fused layers keep for their backward is E4M3 codes with a scale per 128 elements, and what attention
    keeps int8 codes with a scale per head).
    """

    _family: ClassVar[str] = ""
    _plans_by_name: ClassVar[bool] = False  # whether a plan depends on the layer's name
    _flags: ClassVar[tuple[str, ...]] = ()  # names of the fields that are True or False
    _number: ClassVar[str] = (
        ""  # of what :func:`share_plans` has seen: which of the recipes that are not equal
    )

    high_precision_blocks: ClassVar[HighPrecisionBlocks | None] = None
    """What :func:`narrowcast.convert` leaves in high precision by default; None is no block."""

    if TYPE_CHECKING:  # a declaration that dataclass saw would be every recipe's first field
        backward_override: ClassVar[BackwardOverride]
        emulate: ClassVar[bool]
        saved_activations: ClassVar[SavedActivations]

    fp8_gemm_fprop = MMParams(False)
    fp8_gemm_dgrad = MMParams(True)
    fp8_gemm_wgrad = MMParams(True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = tuple(name for name, kind in cls.__annotations__.items() if kind in ("bool", bool))
        cls._flags = (*cls._flags, *own)

    def __post_init__(self) -> None:
        self._check_fields()
        self._check_together()

    def __repr__(self) -> str:
        """Return the class and the fields that differ from its defaults."""
        told = []
        for each in fields(self):
            value = getattr(self, each.name)
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if value != default and not (isinstance(value, QParams) and value.derived):
                text = f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
                told.append(f"{each.name}={text}")
        return f"{type(self).__name__}({', '.join(told)})"

    def _check_fields(self) -> None:
        check_flags(self, self._flags)
        self._derive()
        self._check()

    def _taken(self, name: str, value: Any) -> Any:
        names = [each.name for each in fields(self)]
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(names):.200}"
            raise AttributeError(f"{type(self).__name__} has no field {shown(name)}; {remedy}")
        return value

    def _assigned(self, name: str) -> None:
        self._check_fields()  # the first use asks whether they fit: the next may be assigned

    def _seal(self) -> None:
        if not torch.compiler.is_dynamo_compiling() and not getattr(self, "_sealed", False):
            self._check_together()
        super()._seal()

    def __getstate__(self) -> dict[str, Any]:
        # without plans: a copy may be changed
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _how_to_change(self, name: str) -> str:
        return f"make another recipe by dataclasses.replace(recipe, {name}=...)"

    def _check_together(self) -> None:
        """
        Raises:
            ValueError: fields that are right one by one and do not combine.
        """

    def _derive(self) -> None:
        """Fill in the fields that follow from others."""

    def _check(self) -> None:
        override = self.backward_override
        if not is_one_of(override, (None, "high_precision", "dequantized")):
            raise ValueError(
                f"backward_override is {shown(override)}; use None, 'high_precision' or 'dequantized'"
            )
        if not is_one_of(self.saved_activations, (None, "fp8")):
            raise ValueError(f"saved_activations is {shown(self.saved_activations)}; use None or 'fp8'")
        for name in ("fp8_dpa", "fp8_mha"):
            if getattr(self, name, False):
                raise NotImplementedError(
                    f"{type(self).__name__}({name}=True): FP8 attention is not supported; leave it False, and "
                    "attention runs in the dtype of its tensors"
                )

    def resolve(
        self, mode: Mode, roles: Sequence[QuantizerRole]
    ) -> tuple[list[Quantizer], DelayedScaling | None]:
        """Return the quantizers of a module's direction, one per role, and the recipe that renews delayed ones."""
        kinds = [tensor_type_at(mode, slot, role) for slot, role in enumerate(roles)]
        return [self.make_quantizer(kind) for kind in kinds], self.delayed_scaling()

    def delayed_scaling(self) -> DelayedScaling | None:
        """Return the recipe that renews the state of this recipe's quantizers; None if they keep none."""
        return None

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        """Return the quantizer for one kind of tensor."""
        raise NotImplementedError(f"{type(self).__name__} makes no quantizers of its own")

    @classmethod
    def delayed(cls) -> bool:
        """Return whether this is delayed scaling."""
        return cls._family == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Return whether this is per-tensor current scaling."""
        return cls._family == "current"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Return whether this scales per tensor."""
        return cls._family in ("delayed", "current")

    @classmethod
    def mxfp8(cls) -> bool:
        """Return whether this is MXFP8."""
        return cls._family == "mxfp8"

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Return whether this is 128-block FP8."""
        return cls._family == "float8_block"

    @classmethod
    def nvfp4(cls) -> bool:
        """Return whether this is NVFP4."""
        return cls._family == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """Return whether this is a custom recipe."""
        return cls._family == "custom"


def remember(recipe: Recipe, key: str, plan: Any) -> None:
    """Keep a plan as an attribute of a recipe, where traced code finds it, and of the first equal recipe."""
    for owner in (recipe, _first_equal(recipe)):
        owner._seal()
        object.__setattr__(owner, key, plan)


_NUMBERS = itertools.count()


def share_plans(recipe: Recipe) -> None:
    """Give a recipe the plans of the first equal one: it then fits the graphs that were compiled under that.

    And its number, which differs between recipes that are not equal.
    """
    recipe._seal()
    first = _first_equal(recipe)
    if "_number" not in vars(first):
        object.__setattr__(first, "_number", f"{next(_NUMBERS)}")
    if first is not recipe:
        for name in vars(first).keys() - vars(recipe).keys():
            object.__setattr__(recipe, name, getattr(first, name))


def _first_equal(recipe: Recipe) -> Recipe:
    try:
        return _by_value(recipe)
    except TypeError:  # it holds what cannot be hashed
        return recipe


@functools.lru_cache(maxsize=1024)
def _by_value(recipe: Recipe) -> Recipe:
    return recipe


def fp8_dtype(fp8_format: Format, tensor_type: str) -> DType:
    backward = tensor_type in BACKWARD_TENSOR_TYPES
    return DType.kFloat8E5M2 if fp8_format is Format.HYBRID and backward else DType.kFloat8E4M3


def refuse_pure_e5m2(recipe: Recipe, fp8_format: Format) -> None:
    if not is_one_of(fp8_format, (Format.E4M3, Format.HYBRID)):
        raise ValueError(
            f"{type(recipe).__name__} got fp8_format={shown(fp8_format)}; "
            "training uses narrowcast.recipe.Format.E4M3 or Format.HYBRID"
        )


def own_qparams(recipe: Any, name: str) -> QParams | None:
    """Return the settings that the user gave an operand, or None if they follow from the recipe's other fields.

    Raises:
        ValueError: the field is neither None nor a :class:`QParams`.
    """
    given = getattr(recipe, name)
    if given is not None and not isinstance(given, QParams):
        raise ValueError(f"{type(recipe).__name__}: {name} is {shown(given)}; use a QParams or None")
    return None if given is None or given.derived else given


def fill_qparams(recipe: Any, power_2_scale: bool, amax_epsilon: float = 0.0) -> None:
    """Give the operands without settings of their own those that follow from the recipe's scale choice."""
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        if own_qparams(recipe, name) is None:
            # literals, not defaults: a number read from a default becomes symbolic in a dynamic graph
            object.__setattr__(recipe, name, QParams(power_2_scale, amax_epsilon, False, False, False, True))


def qparams_of(recipe: Any, prefix: str, tensor_type: str) -> QParams:
    if tensor_type in BACKWARD_TENSOR_TYPES:
        return getattr(recipe, f"{prefix}_bwd_grad")
    return getattr(recipe, f"{prefix}_fwd_weight" if tensor_type == "weight" else f"{prefix}_fwd_inp")
