"""torchao.float8's names for training, on narrowcast's layers: a script changes its import and nothing else.

``from narrowcast.compat.torchao_float8 import convert_to_float8_training, Float8LinearConfig`` for one script;
:func:`narrowcast.compat.install_torchao_float8` for code that imports ``torchao.float8`` itself, as trainers do.
"""

from __future__ import annotations

import copy
import enum
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import _checks
from .._checks import a_kind, shown
from ..convert import convert
from ..formats import Members
from ..nn import Linear
from ..recipe import Float8CurrentScaling, Float8RowwiseScaling, Format, MMParams, QParams, Recipe
from .install import StandIn

ModuleFilter = Callable[[nn.Module, str], bool]

e4m3_dtype, e5m2_dtype = torch.float8_e4m3fn, torch.float8_e5m2
VERSION = "0.18.0+narrowcast"  # whose names these are
_EPSILON = 1e-12  # the least amax that torchao scales by
_PAGE = 'the page "From torchao" lists what each option means here'


class ScalingType(enum.Enum, metaclass=Members):
    """Whether a tensor is cast to FP8, with a scale from its own values."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"


class ScalingGranularity(enum.Enum, metaclass=Members):
    """One scale for the tensor, or one for each row along the contraction."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


class Float8LinearRecipeName(enum.Enum, metaclass=Members):
    """Names of configurations, for :meth:`Float8LinearConfig.from_recipe_name`."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class CastConfig:
    """The cast of one operand of one GEMM; without a ``target_dtype``, E4M3 for inputs and weights, E5M2 for gradients.

    Raises:
        ValueError: rows are scaled without a scale, or ``target_dtype`` is no FP8 dtype.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if (
            self.scaling_granularity is ScalingGranularity.AXISWISE
            and self.scaling_type is not ScalingType.DYNAMIC
        ):
            raise ValueError(
                "scaling_granularity is AXISWISE and scaling_type DISABLED; rows are scaled with DYNAMIC alone"
            )
        if self.target_dtype not in (None, e4m3_dtype, e5m2_dtype):
            raise ValueError(
                f"target_dtype is {self.target_dtype}; use torch.float8_e4m3fn, torch.float8_e5m2 or None"
            )


@dataclass(frozen=True)
class Float8GemmConfig:
    """Accumulation of one GEMM: fast in the tensor cores, or promoted to fp32 at intervals."""

    use_fast_accum: bool = False


def _fast() -> Float8GemmConfig:
    return Float8GemmConfig(use_fast_accum=True)


@dataclass(frozen=True)
class Float8LinearConfig:
    """What torchao's class of this name says, for conversion by :func:`convert_to_float8_training`.

    The operands of dgrad and wgrad (``..._for_grad_...``) are cast as those of fprop by default. Two options change
    nothing: ``pad_inner_dim``, since every shape works, and ``force_recompute_fp8_weight_in_bwd``.
    ``enable_fsdp_float8_all_gather`` is what :func:`narrowcast.distributed.shard` does; ``fully_shard`` gathers in high
    precision, with the same numbers.

    Raises:
        ValueError: one operand of a GEMM is cast and the other is not, the two casts of a tensor have different dtypes,
            or rows of weights are scaled with ``enable_fsdp_float8_all_gather``.
    """

    cast_config_input: CastConfig = field(default_factory=CastConfig)
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = field(default_factory=CastConfig)
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = field(default_factory=CastConfig)
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = field(default_factory=_fast)
    gemm_config_grad_input: Float8GemmConfig = field(default_factory=Float8GemmConfig)
    gemm_config_grad_weight: Float8GemmConfig = field(default_factory=Float8GemmConfig)
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        pairs = (
            ("cast_config_input", "cast_config_input_for_grad_weight", e4m3_dtype),
            ("cast_config_weight", "cast_config_weight_for_grad_input", e4m3_dtype),
            ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight", e5m2_dtype),
        )
        for name, second, dtype in pairs:
            # new objects: one that the caller shares between operands keeps its value
            own = [
                _with_dtype(getattr(self, one), dtype)
                for one in (name, second)
                if getattr(self, one) is not None
            ]
            if own[0].target_dtype != own[-1].target_dtype:
                raise ValueError(
                    f"{name} has {own[0].target_dtype} and {second} {own[-1].target_dtype}; use one dtype for both"
                )
            object.__setattr__(self, name, own[0])
            object.__setattr__(self, second, own[-1])
        for gemm, casts in self._operands().items():
            if len({cast.scaling_type for cast in casts}) > 1:
                raise ValueError(
                    f"one operand of the GEMM of {gemm} is DYNAMIC and the other DISABLED; give both one scaling_type"
                )
        if (
            self.enable_fsdp_float8_all_gather
            and self.cast_config_weight.scaling_granularity is not ScalingGranularity.TENSORWISE
        ):
            raise ValueError(
                "enable_fsdp_float8_all_gather is True and weights are scaled by row; it needs TENSORWISE weights"
            )

    def _operands(self) -> dict[str, tuple[Any, Any]]:
        """Return the casts of the two operands of each GEMM."""
        return {
            "output": (self.cast_config_input, self.cast_config_weight),
            "grad_input": (self.cast_config_grad_output, self.cast_config_weight_for_grad_input),
            "grad_weight": (
                self.cast_config_grad_output_for_grad_weight,
                self.cast_config_input_for_grad_weight,
            ),
        }

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """Return the configuration of a name, or of its string.

        Raises:
            ValueError: there is no such name.
        """
        name = _recipe_name(recipe_name)
        if name is Float8LinearRecipeName.TENSORWISE:
            return Float8LinearConfig()
        rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=e4m3_dtype)
        config = Float8LinearConfig(
            cast_config_input=rows,
            cast_config_weight=rows,
            cast_config_grad_output=rows,
            round_scales_to_power_of_2=True,
        )
        if name is Float8LinearRecipeName.ROWWISE:
            return config
        plain = CastConfig(ScalingType.DISABLED, target_dtype=e4m3_dtype)
        return replace(
            config,
            cast_config_weight_for_grad_input=CastConfig(),
            cast_config_input_for_grad_weight=plain,
            cast_config_grad_output_for_grad_weight=plain,
        )


def _with_dtype(cast: CastConfig, dtype: torch.dtype) -> CastConfig:
    return cast if cast.target_dtype is not None else replace(cast, target_dtype=dtype)


def _recipe_name(name: Any) -> Float8LinearRecipeName:
    if isinstance(name, Float8LinearRecipeName):
        return name
    known = [one.value for one in Float8LinearRecipeName]
    if name not in known:
        raise ValueError(f"recipe_name is {_checks.not_among(name, known)}")
    return Float8LinearRecipeName(name)


def recipe_of(config: Float8LinearConfig) -> Recipe | None:
    """Return the recipe that computes what a configuration says; None if it casts nothing.

    Raises:
        ValueError: no recipe mixes the casts of its operands so.
    """
    casts = {
        gemm: tuple(
            None if one.scaling_type is ScalingType.DISABLED else one.scaling_granularity for one in operands
        )
        for gemm, operands in config._operands().items()
    }
    tensors, rows, plain = (
        (one, one) for one in (ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE, None)
    )
    forward, dgrad, wgrad = casts.values()
    gradient = config.cast_config_grad_output.target_dtype
    known = forward == dgrad == wgrad or dgrad == wgrad == plain
    mixed = forward == rows and dgrad == (rows[0], tensors[0]) and wgrad == plain
    forwards_are_e4m3 = {config.cast_config_input.target_dtype, config.cast_config_weight.target_dtype} == {
        e4m3_dtype
    }
    if forward == plain and known:
        return None
    if not (known or mixed) or forward not in (tensors, rows) or not forwards_are_e4m3:
        raise ValueError(
            "no recipe casts so: use one granularity for all operands, DISABLED for all of the backward, or "
            f"from_recipe_name('rowwise_with_gw_hp'), with E4M3 inputs and weights; {_PAGE}"
        )
    power_2 = config.round_scales_to_power_of_2
    options: dict[str, Any] = {
        "fp8_format": Format.HYBRID if gradient == e5m2_dtype else Format.E4M3,
        "backward_override": "high_precision" if dgrad == plain else None,
        "fp8_gemm_fprop": MMParams(not config.gemm_config_output.use_fast_accum),
        "fp8_gemm_dgrad": MMParams(not config.gemm_config_grad_input.use_fast_accum),
        "fp8_gemm_wgrad": MMParams(not config.gemm_config_grad_weight.use_fast_accum),
    }
    if config.emulate:
        options["emulate"] = True
    if forward == rows:
        return Float8RowwiseScaling(use_power_2_scales=power_2, high_precision_wgrad=mixed, **options)
    params = QParams(power_2_scale=power_2, amax_epsilon=_EPSILON)
    operands = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    return Float8CurrentScaling(use_power_2_scales=power_2, **dict.fromkeys(operands, params), **options)


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Convert the ``nn.Linear``s of a model to FP8 training, as torchao's function of this name.

    Modules are converted where they are, with their parameters, ties, hooks and mode, and :func:`narrowcast.revert`
    undoes it. A subclass with a ``forward`` of its own stays as it is, with a warning.

    Args:
        module: the model, or one ``nn.Linear``; also on the meta device.
        module_filter_fn: function of (module, name), True for the ``nn.Linear``s to convert; default: all.
        config: default: one scale per tensor.
    Returns:
        ``module``.
    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no recipe computes what ``config`` says.
    """
    _checks.module("module", module)
    if config is not None and not isinstance(config, Float8LinearConfig):
        raise TypeError(f"config is {a_kind(config)}; pass a Float8LinearConfig of the same import")
    config = Float8LinearConfig() if config is None else config
    recipe = recipe_of(config)
    linear = {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear)}
    wanted = {name for name, one in linear.items() if module_filter_fn is None or module_filter_fn(one, name)}
    own = sorted(
        name
        for name in wanted
        if type(linear[name]).forward is not nn.Linear.forward and not isinstance(linear[name], Linear)
    )
    if own:
        warnings.warn(
            f"{len(own)} nn.Linear with a forward of their own, such as {shown(own[0])}, stay as they are",
            stacklevel=2,
        )
    wanted.difference_update(own)
    if recipe is None or not wanted:
        return module
    everything = dict.fromkeys(("routers", "heads", "small", "blocks"), True)
    return convert(module, recipe, only=lambda name, one: name in wanted, **everything)


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Do nothing: after :func:`narrowcast.distributed.shard` the forward reduces the scales of all weights at once."""
    _checks.module("module", module)


def _auto_filter_for_recipe(recipe: Float8LinearRecipeName | str, filter_fqns: Sequence[str]) -> ModuleFilter:
    """Return a filter for :func:`convert_to_float8_training` that leaves out layers too small to gain on an H100.

    Args:
        recipe: "tensorwise" or "rowwise".
        filter_fqns: parts of names; modules whose name holds one stay.
    Raises:
        NotImplementedError: for "rowwise_with_gw_hp", of which torchao publishes no sizes.
    """
    name = _recipe_name(recipe)
    if name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP:
        raise NotImplementedError(
            "no sizes are known for 'rowwise_with_gw_hp'; pass a module_filter_fn of your own"
        )

    tensorwise = name is Float8LinearRecipeName.TENSORWISE
    gains = _auto_filter_for_tensorwise if tensorwise else _auto_filter_for_rowwise
    return functools.partial(gains, filter_fqns=filter_fqns)


def _auto_filter_for_tensorwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    outputs, inputs = _sizes(mod, fqn, filter_fqns)
    return outputs > 1024 or inputs > 4096


def _auto_filter_for_rowwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    outputs, inputs = _sizes(mod, fqn, filter_fqns)
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)


def _sizes(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> tuple[int, int]:
    """Return output and input features, or zeros for a module that a filter or its sizes exclude."""
    if not isinstance(mod, nn.Linear) or any(part in fqn for part in filter_fqns):
        return 0, 0
    outputs, inputs = mod.weight.shape
    return (0, 0) if outputs % 16 or inputs % 16 else (outputs, inputs)


class _OfConverted(type):
    def __instancecheck__(cls, module: Any) -> bool:
        return isinstance(module, nn.Linear) and isinstance(module, Linear) and module.recipe is not None


class Float8Linear(metaclass=_OfConverted):
    """What converted layers are instances of, for code that looks for torchao's."""

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> nn.Module:
        """Return a converted layer with the parameters of ``mod``, which stays as it is."""
        _checks.module("mod", mod)
        one = copy.copy(mod)
        vars(one).update(
            {name: copy.copy(vars(mod)[name]) for name in ("_parameters", "_buffers", "_modules")}
        )
        return convert_to_float8_training(one, config=config)


PUBLIC = (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
    _auto_filter_for_recipe,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
_CONFIG = PUBLIC[:6]
MODULES: dict[str, tuple[Any, ...]] = {
    "float8": PUBLIC,
    "float8.config": _CONFIG,
    "float8.float8_linear": (Float8Linear,),
    "float8.float8_linear_utils": (
        convert_to_float8_training,
        _auto_filter_for_recipe,
        _auto_filter_for_rowwise,
        _auto_filter_for_tensorwise,
    ),
    "float8.fsdp_utils": (precompute_float8_dynamic_scale_for_fsdp,),
}
"""By module below ``torchao``, the names that it gets."""
_STANDS_IN = StandIn("torchao", VERSION)
_REPLACED: list[tuple[ModuleType, str, Any]] = []  # module, name, and what it was


def install_torchao_float8() -> None:
    """Make ``torchao.float8`` give narrowcast's layers for training, in this process.

    With torchao installed, its other parts stay, and so does what its names were to code that has imported them;
    without it, ``torchao`` is these names alone. A second call changes nothing.
    """
    if _REPLACED:
        return
    if importlib.util.find_spec("torchao") is None:
        for name in ("torchao", *(f"torchao.{below}" for below in MODULES)):
            module = sys.modules[name] = ModuleType(name, "narrowcast's names where torchao has its own.")
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            vars(module)["__version__"] = VERSION
            owner, _, below = name.rpartition(".")
            if owner:
                setattr(sys.modules[owner], below, module)
        sys.meta_path.append(_STANDS_IN)
    for below, names in MODULES.items():
        module = importlib.import_module(f"torchao.{below}")
        for one in names:
            _REPLACED.append((module, one.__name__, vars(module).get(one.__name__)))
            setattr(module, one.__name__, one)


def uninstall_torchao_float8() -> None:
    """Undo :func:`install_torchao_float8`; modules that have already imported names keep them."""
    for module, name, before in _REPLACED:
        setattr(module, name, before)
    _REPLACED.clear()
    if _STANDS_IN in sys.meta_path:
        sys.meta_path.remove(_STANDS_IN)
        for name in ("torchao", *(f"torchao.{below}" for below in MODULES)):
            sys.modules.pop(name, None)
