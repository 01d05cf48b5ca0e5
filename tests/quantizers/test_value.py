"""Quantizers are values: equal when their fields are, rebuilt from text, and never changed."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference.checks import normal

import narrowcast as nc
from narrowcast.dynamo import register_value_opaque_quantizer
from narrowcast.functional.quantizer_value import quantizer_of_text
from narrowcast.quantizers import DelayedFloat8Quantizer, Float8GroupsQuantizer, Float8RowsQuantizer
from narrowcast.quantizers import quantizer as quantizer_module
from narrowcast.quantizers.value import _rebuild_quantizer, class_identifier, value_fields

from .catalog import E4M3, E5M2, SHAPES, USAGES, VARIANTS, assert_same_buffers, delayed, quantize

VALUES: dict[str, nc.Quantizer] = {**VARIANTS, "delayed slot": DelayedFloat8Quantizer(E5M2, 3, -57344.0)}
BASE_FIELDS = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")
FIELDS: dict[type[nc.Quantizer], tuple[str, ...]] = {
    nc.Float8CurrentScalingQuantizer: ("dtype", "with_amax_reduction", "force_pow_2_scales", "amax_epsilon"),
    DelayedFloat8Quantizer: ("dtype", "slot", "unseen"),
    nc.MXFP8Quantizer: ("dtype", "with_2d_quantization"),
    nc.MXFP6Quantizer: ("dtype", "with_2d_quantization"),
    nc.MXFP4Quantizer: ("dtype", "with_2d_quantization"),
    nc.Float8BlockQuantizer: ("dtype", "amax_epsilon", "force_pow_2_scales", "block_scaling_dim"),
    Float8RowsQuantizer: ("dtype", "rule", "amax_epsilon", "smallest_scale"),
    Float8GroupsQuantizer: (
        "dtype",
        "amax_epsilon",
        "force_pow_2_scales",
        "block_scaling_dim",
        "rule",
        "smallest_scale",
    ),
    nc.NVFP4Quantizer: (
        "with_amax_reduction",
        "dtype",
        "with_rht",
        "with_post_rht_amax",
        "with_2d_quantization",
        "stochastic_rounding",
        "row_scaled_nvfp4",
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
        "nvfp4_4over6_err_mode",
        "rht_matrix_random_sign_mask_t",
    ),
    nc.IdentityQuantizer: ("hp_dtype",),
}


def other_value(value: Any) -> Any:
    """A different value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(member for member in type(value) if member is not value)
    return value + "x" if isinstance(value, str) else value + 1


def rebuilt(quantizer: nc.Quantizer) -> nc.Quantizer:
    expression, names = quantizer.__fx_repr__()
    return eval(expression, dict(names))


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_value_fields(cls: type[nc.Quantizer]) -> None:
    assert cls._value_fields() == BASE_FIELDS + FIELDS[cls]


@pytest.mark.parametrize("quantizer", VALUES.values(), ids=VALUES)
def test_the_key_names_every_field_and_survives_text(quantizer: nc.Quantizer) -> None:
    key = quantizer._value_key()
    name, items = key
    assert name == type(quantizer).__qualname__
    assert tuple(field for field, _ in items) == type(quantizer)._value_fields()
    assert all(type(value) in (bool, int, float, str) for _, value in items)
    assert eval(repr(key)) == key
    hash(key)


@pytest.mark.parametrize("quantizer", VALUES.values(), ids=VALUES)
def test_a_file_of_a_program_names_no_module_of_the_library(quantizer: nc.Quantizer) -> None:
    """So that a file is read by a version in which the class stands elsewhere."""
    text = quantizer._value_text()
    assert text.startswith(f"('narrowcast:{type(quantizer).__name__}', ")
    assert quantizer_of_text(text) == quantizer


@pytest.mark.parametrize("quantizer", VALUES.values(), ids=VALUES)
def test_fx_repr_rebuilds_an_equal_quantizer(quantizer: nc.Quantizer) -> None:
    twin = rebuilt(quantizer)
    assert type(twin) is type(quantizer)
    assert twin == quantizer and twin is not quantizer and hash(twin) == hash(quantizer)
    assert vars(twin) == vars(quantizer)
    assert all(type(value) is type(vars(quantizer)[name]) for name, value in vars(twin).items())
    _, names = quantizer.__fx_repr__()
    pickle.dumps(names)  # the compiler's caches need it


@pytest.mark.parametrize("quantizer", VALUES.values(), ids=VALUES)
def test_one_changed_field_makes_another_value(quantizer: nc.Quantizer) -> None:
    fields = type(quantizer)._value_fields()
    assert fields is not None
    for name in fields:
        other = {name: other_value(getattr(quantizer, name))}  # past the checks of replace
        changed = _rebuild_quantizer(type(quantizer), tuple({**vars(quantizer), **other}.items()))
        assert changed != quantizer, name
        assert hash(changed) != hash(quantizer), name
        assert rebuilt(changed) == changed, name


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, nc.Quantizer.copy, lambda q: pickle.loads(pickle.dumps(q))]
)
@pytest.mark.parametrize("quantizer", VALUES.values(), ids=VALUES)
def test_copies_are_equal(quantizer: nc.Quantizer, copied: Any) -> None:
    twin = copied(quantizer)
    assert twin == quantizer and twin is not quantizer and hash(twin) == hash(quantizer)


def test_different_classes_are_unequal_even_with_equal_fields() -> None:
    quantizers = list(VALUES.values())
    assert len({hash(q) for q in quantizers}) == len(quantizers)
    assert all((a == b) == (a is b) for a in quantizers for b in quantizers)
    assert quantizers[0] != object()
    assert quantizers[0].__eq__(5) is NotImplemented


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_rebuilt_quantizer_writes_the_same_bytes(name: str, usage: tuple[bool, bool]) -> None:
    quantizer = VARIANTS[name].with_usage(*usage)
    for shape in SHAPES:
        x = normal(shape, torch.bfloat16)
        assert_same_buffers(quantize(rebuilt(quantizer), x), quantize(quantizer, x))


class PlainSubclass(nc.Float8CurrentScalingQuantizer):
    """Adds a knob and does not register."""

    knob: bool

    def __init__(self, *args: Any, knob: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._freeze(knob=knob)


def test_an_unregistered_subclass_has_identity_semantics() -> None:
    one, two = PlainSubclass(E4M3), PlainSubclass(E4M3)
    parent = nc.Float8CurrentScalingQuantizer(E4M3)
    assert PlainSubclass._value_fields() is None
    assert one == one and one != two and one != parent and parent != one
    assert hash(one) != hash(two)
    with pytest.raises(TypeError, match="PlainSubclass has no value fields"):
        one._value_key()
    with pytest.raises(
        TypeError, match=r"PlainSubclass is not registered.*register_value_opaque_quantizer\(PlainSubclass\)"
    ):
        one.__fx_repr__()
    assert one.copy() != one
    assert one.copy().knob is False  # type: ignore[attr-defined]


class Flavour(enum.Enum):
    SWEET = "sweet"
    SOUR = "sour"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register_value_opaque_quantizer
class RegisteredSubclass(nc.Float8CurrentScalingQuantizer):
    """Adds enums of two kinds and registers."""

    flavour: Flavour
    level: Level

    def __init__(
        self, *args: Any, flavour: Flavour = Flavour.SWEET, level: Level = Level.LOW, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._freeze(flavour=flavour, level=level)


def test_a_registered_subclass_is_a_value_of_its_own() -> None:
    one, two = RegisteredSubclass(E4M3), RegisteredSubclass(E4M3)
    parent = nc.Float8CurrentScalingQuantizer(E4M3)
    assert one == two and hash(one) == hash(two)
    assert one != parent and parent != one
    fields = nc.Float8CurrentScalingQuantizer._value_fields()
    assert fields and RegisteredSubclass._value_fields() == (*fields, "flavour", "level")


def test_enum_fields_come_back_as_enums() -> None:
    original = RegisteredSubclass(E4M3, flavour=Flavour.SOUR, level=Level.HIGH)
    twin: Any = rebuilt(original)
    assert twin == original
    assert twin.flavour is Flavour.SOUR and twin.level is Level.HIGH and twin.dtype is E4M3
    assert eval(repr(original._value_key())) == original._value_key()
    assert original.replace(level=Level.LOW) != original


class Deriving(nc.MXFP8Quantizer):
    """Counts how often its derived state is computed, of fields of its own and of its base."""

    knob: int

    def __init__(self, *args: Any, knob: int = 0, **kwargs: Any) -> None:
        self._freeze(knob=knob)  # before the base constructor, which derives from it
        super().__init__(*args, **kwargs)

    def _rebuild_derived_state(self) -> None:
        self._freeze(
            count=vars(self).get("count", 0) + 1, derived=(self.knob, self.dtype, self.columnwise_usage)
        )


def test_derived_state_is_computed_once_in_each_path() -> None:
    register_value_opaque_quantizer(Deriving)
    original: Any = Deriving(E4M3, knob=3)
    assert original.count == 1 and original.derived == (3, E4M3, True)
    again: Any = rebuilt(original)
    assert again.count == 1 and again.derived == original.derived
    assert "derived" not in dict(original._value_key()[1])


def test_a_field_that_is_assigned_is_derived_from_and_what_is_no_field_is_not() -> None:
    class NotRegistered(Deriving):
        pass

    quantizer: Any = NotRegistered(E4M3, knob=3)
    quantizer.remark = "mine"
    assert quantizer.count == 1
    quantizer.knob = 4
    assert quantizer.count == 2 and quantizer.derived == (4, E4M3, True)


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (nc.Float8CurrentScalingQuantizer, (E4M3,)),
        (DelayedFloat8Quantizer, (E4M3, 0)),
        (nc.MXFP8Quantizer, (E4M3,)),
        (nc.MXFP6Quantizer, ()),
        (nc.MXFP4Quantizer, ()),
        (nc.NVFP4Quantizer, ()),
        (nc.IdentityQuantizer, ()),
    ],
)
def test_the_constructor_derives_once_when_all_fields_are_there(
    cls: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    monkeypatch.setattr(cls, "_rebuild_derived_state", lambda self: seen.append(set(vars(self))))
    cls(*arguments)
    assert seen == [set(cls._value_fields())]


def test_rebuilding_keeps_nothing_but_the_value() -> None:
    group = object()
    original = nc.Float8CurrentScalingQuantizer(E4M3, amax_reduction_group=group)
    assert getattr(rebuilt(original), "amax_reduction_group", None) is None
    assert getattr(original.copy(), "amax_reduction_group", None) is group


def test_a_field_without_a_value_is_an_error() -> None:
    cls = nc.MXFP8Quantizer
    incomplete = _rebuild_quantizer(cls, (("rowwise_usage", True),))
    with pytest.raises(AttributeError):
        incomplete._value_key()


class HoldsTensor(nc.Quantizer):
    state: torch.Tensor


class HoldsList(nc.Quantizer):
    sizes: list[int]


@pytest.mark.parametrize(
    ("cls", "field"), [(HoldsTensor, "state"), (HoldsList, "sizes"), (nc.Float8Quantizer, "scale")]
)
def test_a_field_of_another_type_is_refused_by_name(cls: type[nc.Quantizer], field: str) -> None:
    for check in (value_fields, register_value_opaque_quantizer):
        with pytest.raises(TypeError, match=rf"{cls.__name__}\.{field}"):
            check(cls)
    assert cls._value_fields() is None


def test_a_tensor_put_on_a_value_is_refused() -> None:
    quantizer = nc.MXFP8Quantizer(E4M3)
    object.__setattr__(quantizer, "cache", torch.ones(1))
    with pytest.raises(TypeError, match=r"MXFP8Quantizer\.cache holds a tensor"):
        hash(quantizer)


@pytest.fixture(scope="module")
def process_group() -> Iterator[Any]:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.mark.parametrize("attribute", ["amax_reduction_group", "dtype", "anything"])
def test_a_process_group_is_refused_wherever_it_sits(process_group: Any, attribute: str) -> None:
    quantizer = nc.MXFP8Quantizer(E4M3)
    object.__setattr__(quantizer, attribute, process_group)
    message = rf"MXFP8Quantizer\.{attribute} holds a process group.*pass the group to each quantize call"
    for use in (
        hash,
        lambda q: q == nc.MXFP8Quantizer(E4M3),
        nc.Quantizer.__fx_repr__,
        nc.Quantizer._value_key,
    ):
        with pytest.raises(TypeError, match=message):
            use(quantizer)
    assert quantizer == quantizer


def test_an_own_fx_repr_does_not_bypass_the_guard(process_group: Any) -> None:
    @register_value_opaque_quantizer
    class OwnText(nc.MXFP8Quantizer):
        def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
            return f"OwnText({self._value_key()!r})", {"OwnText": OwnText}

    assert OwnText(E4M3).__fx_repr__()[0].startswith("OwnText")
    quantizer = OwnText(E4M3)
    object.__setattr__(quantizer, "group", process_group)
    with pytest.raises(TypeError, match="group holds a process group"):
        quantizer.__fx_repr__()


def test_a_quantized_tensor_never_holds_the_group(process_group: Any) -> None:
    x = normal((33, 50), torch.bfloat16)
    plain = nc.Float8CurrentScalingQuantizer(E4M3)
    stored = nc.Float8CurrentScalingQuantizer(
        E4M3, with_amax_reduction=True, amax_reduction_group=process_group
    )
    given = nc.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    unused = nc.Float8CurrentScalingQuantizer(E4M3, amax_reduction_group=process_group)
    tensors = [
        stored.quantize(x),
        given.quantize(x, amax_reduction_group=process_group),
        unused.quantize(x),
        unused.make_empty((33, 50), dtype=torch.bfloat16, device="cpu").copy_(x),
    ]
    for tensor in tensors:
        assert tensor._quantizer == plain
        assert_same_buffers(tensor, plain.quantize(x))
    assert stored.create_metadata((33, 50), dtype=torch.bfloat16) == tensors[0].__tensor_flatten__()[1]


def test_formats_without_a_reduction_say_so(process_group: Any) -> None:
    with pytest.raises(NotImplementedError, match="MXFP8Quantizer does not reduce"):
        nc.MXFP8Quantizer(E4M3).quantize(torch.ones(32, 32), amax_reduction_group=process_group)
    out = nc.MXFP8Quantizer(E4M3).quantize(torch.ones(32, 32))
    with pytest.raises(NotImplementedError, match="MXFP8Quantizer does not reduce"):
        nc.MXFP8Quantizer(E4M3).quantize(torch.ones(32, 32), out=out, amax_reduction_group=process_group)
    with pytest.raises(ValueError, match="row_scaled_nvfp4 together with with_amax_reduction"):
        nc.NVFP4Quantizer(with_amax_reduction=True, row_scaled_nvfp4=True)


REPLACEMENTS: list[tuple[nc.Quantizer, dict[str, Any], type[Exception], str]] = [
    (
        VARIANTS["nvfp4 rht"],
        {"nvfp4_use_4over6": True},
        ValueError,
        "nvfp4_use_4over6 together with with_rht",
    ),
    (VARIANTS["nvfp4"], {"nvfp4_e4m3_max": 449}, ValueError, "nvfp4_e4m3_max is 449"),
    (VARIANTS["nvfp4"], {"nvfp4_4over6_err_mode": "L1"}, ValueError, "err_mode is 'L1'"),
    (VARIANTS["nvfp4"], {"dtype": E4M3}, ValueError, "dtype is DType.kFloat8E4M3"),
    (VARIANTS["mxfp8"], {"dtype": nc.DType.kByte}, ValueError, "kByte.*; use"),
    (VARIANTS["mxfp6"], {"dtype": E4M3}, ValueError, "use DType.kFloat6E2M3 or"),
    (VARIANTS["mxfp4"], {"dtype": E4M3}, ValueError, "use DType.kFloat4E2M1"),
    (VARIANTS["mxfp8"], {"dtype": torch.int8}, ValueError, "is torch.int8; use DType.kFloat8E4M3 or"),
    (VARIANTS["mxfp8"], {"dtype": torch.uint8}, ValueError, "is DType.kByte; use DType.kFloat8E4M3 or"),
    (VARIANTS["block"], {"block_scaling_dim": 3}, ValueError, "block_scaling_dim is 3"),
    (VARIANTS["current"], {"dtype": "e4m3"}, ValueError, "e4m3"),
    (VARIANTS["current"], {"amax_epsilon": "small"}, TypeError, "amax_epsilon is 'small'; use .* float"),
    (VARIANTS["current"], {"rowwise_usage": "no"}, TypeError, "rowwise_usage is 'no'; use .* bool"),
    (VARIANTS["identity"], {"hp_dtype": "float64"}, ValueError, "dtype is torch.float64"),
    (PlainSubclass(E4M3), {"dtype": nc.DType.kByte}, ValueError, "kByte.*; use"),
]


@pytest.mark.parametrize(
    ("quantizer", "change", "error", "message"), REPLACEMENTS, ids=[str(row[1]) for row in REPLACEMENTS]
)
def test_replace_takes_what_the_constructor_takes(
    quantizer: nc.Quantizer, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantizer.replace(**change)


def test_replace_keeps_the_types_of_fields() -> None:
    made: Any = nc.Float8CurrentScalingQuantizer(E4M3).replace(
        dtype=torch.float8_e5m2, amax_epsilon=1, internal=1
    )
    assert made.dtype is E5M2 and type(made.amax_epsilon) is float and made.internal is True
    assert rebuilt(made) == made


def test_nothing_can_be_changed_once_it_was_used() -> None:
    quantizer = nc.MXFP8Quantizer(E4M3)
    hash(quantizer)
    with pytest.raises(
        AttributeError,
        match=r"MXFP8Quantizer has been used and is immutable.*replace\(rowwise_usage=\.\.\.\)",
    ):
        quantizer.rowwise_usage = False
    with pytest.raises(AttributeError, match=r"'rowwise_usage' cannot be assigned.*with_usage"):
        quantizer.set_usage(rowwise=False)
    with pytest.raises(AttributeError, match="no field 'row'"):
        quantizer.replace(row=1)
    narrowed = quantizer.with_usage(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    assert narrowed.get_usages() == {"rowwise": True, "columnwise": False}
    assert narrowed.with_usage(columnwise=True) == quantizer


def test_live_state_means_identity() -> None:
    one, two = delayed(), delayed()
    assert one == one and one != two
    assert len({one, two, one}) == 2
    assert vars(one.with_usage(columnwise=False))["scale"] is one.scale


def test_an_identifier_outlives_moves_of_the_library_and_tells_classes_of_one_name_apart() -> None:
    assert nc.MXFP8Quantizer._identifier == "narrowcast:MXFP8Quantizer"
    assert class_identifier(nc.MXFP8Quantizer) == "narrowcast:MXFP8Quantizer#2"

    class Mine(nc.MXFP8Quantizer):
        pass

    assert Mine._identifier == f"{__name__}:{Mine.__qualname__}"


def test_a_field_that_is_assigned_is_checked_with_the_others() -> None:
    quantizer = nc.NVFP4Quantizer(with_rht=True)
    with pytest.raises(ValueError, match="does not define nvfp4_use_4over6 together with with_rht"):
        quantizer.nvfp4_use_4over6 = True


@pytest.mark.parametrize("quantizer", [one for one in VARIANTS.values() if one._elements], ids=str)
def test_an_element_of_another_format_is_refused(quantizer: nc.Quantizer) -> None:
    with pytest.raises(ValueError, match="dtype is"):
        quantizer.replace(dtype=nc.DType.kFloat32)


def test_options_that_no_format_has_are_refused() -> None:
    with pytest.raises(TypeError, match="with_2d_quantization"):
        nc.MXFP8Quantizer(E4M3, with_2d_quantization="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rule is 'largest'"):
        Float8RowsQuantizer(E4M3, rule="largest")


def test_which_rows_change_the_codes_of_a_row() -> None:
    by_row = {"row_scaled_nvfp4": True, "with_rht": False}
    of_nvfp4 = [
        nc.NVFP4Quantizer(),
        nc.NVFP4Quantizer(with_2d_quantization=True),
        nc.NVFP4Quantizer(**by_row),
    ]
    assert [one._spans_rows() for one in of_nvfp4] == [True, True, False]
    current, mxfp8 = nc.Float8CurrentScalingQuantizer(E4M3), nc.MXFP8Quantizer(E4M3)
    for rows, columns, spans in ((current, mxfp8, True), (mxfp8, current, False)):
        assert nc.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)._spans_rows() is spans


def test_a_subclass_is_no_value_in_graphs_before_it_is_registered() -> None:
    class Mine(nc.MXFP8Quantizer):
        pass

    assert nc.MXFP8Quantizer._te_compile_value_opaque and not Mine._te_compile_value_opaque


def test_a_class_keyword_that_nobody_takes_is_refused() -> None:
    with pytest.raises(TypeError, match="keyword"):

        class Mine(nc.MXFP8Quantizer, unknown=1):  # type: ignore[call-arg]
            pass


@pytest.mark.parametrize("name", VALUES)
def test_the_value_of_a_sealed_quantizer_is_computed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards of compiled code compare the quantizers of all quantized weights at every call."""
    quantizer = VALUES[name].copy()
    other = copy.deepcopy(quantizer)
    text = quantizer._value_text()
    assert quantizer == other and hash(quantizer) == hash(other) and other._value_text() == text
    monkeypatch.setattr(quantizer_module, "check_value", None)  # whoever computes a value calls it
    assert quantizer == other and hash(quantizer) == hash(other)
    assert quantizer._value_text() is text and other._value_text() == text
    monkeypatch.undo()
    copied = copy.deepcopy(quantizer)  # unsealed, and without what the first one knows
    copied.rowwise_usage = not copied.rowwise_usage
    assert copied != quantizer and copied._value_text() != text and hash(copied) != hash(quantizer)
