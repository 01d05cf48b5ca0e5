"""The one place that reads environment variables.

Every variable is ``NARROWCAST_<NAME>``; the spelling ``NVTE_<NAME>`` is accepted as a fallback, so that scripts
written for Transformer Engine keep their settings. Values are read when the object they configure is built, never
at import and never inside a traced graph's later calls.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection

from ._checks import shown

_PREFIXES = ("NARROWCAST_", "NVTE_")
_NAMES = (
    "ALLOW_NONDETERMINISTIC_ALGO",
    "CACHE",
    "DEBUG",
    "DEBUG_LEVEL",
    "EMULATE",
    "FLASH_ATTN",
    "FP8_BLOCK_SCALING_FP32_SCALES",
    "FP8_CURRENT_SCALING_POWER_2_SCALES",
    "FUSED_ATTN",
    "INLINE",
    "NVFP4_4OVER6",
    "NVFP4_4OVER6_E4M3_USE_256",
    "NVFP4_4OVER6_ERR_MODE",
    "NVFP4_DISABLE_2D_QUANTIZATION",
    "NVFP4_DISABLE_RHT",
    "NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "NVFP4_ROW_SCALED_ACTIVATION",
    "REPLAY",
    "UNFUSED_ATTN",
)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def warn_of_misspelt() -> None:
    """Warn, at the line that imports the package, of each ``NARROWCAST_`` variable that is nearly one of these."""
    for variable in os.environ:
        name = variable.removeprefix("NARROWCAST_")
        near = difflib.get_close_matches(name, _NAMES, 1) if name not in (variable, *_NAMES) else []
        if near:
            warnings.warn(
                f"nothing reads the environment variable {shown(variable)}; did you mean NARROWCAST_{near[0]}?",
                stacklevel=3,
            )


def switches() -> list[tuple[str, str]]:
    """Return all variables that are set, in order."""
    return sorted(item for item in os.environ.items() if item[0].startswith(_PREFIXES))


def read_text(name: str, default: str) -> str:
    """Return text value of ``NARROWCAST_<name>``, else of ``NVTE_<name>``, else ``default``."""
    for prefix in _PREFIXES:
        value = os.environ.get(prefix + name)
        if value is not None:
            return value
    return default


def read_flag(name: str, default: bool = False) -> bool:
    """Return the boolean value of a variable.

    Raises:
        ValueError: the variable is set to something that is neither true nor false.
    """
    text = read_text(name, "1" if default else "0").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"environment variable NARROWCAST_{name} is {shown(text)}; use 1 or 0")


def read_foreign(name: str) -> str | None:
    """Return the value of a variable that belongs to other tools, such as ``CXX``; None if it is not set."""
    return os.environ.get(name)


def read_by_first_word(words: Collection[str]) -> dict[str, str]:
    """Return every variable whose name begins with one of ``words`` and an underscore, sorted by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.partition("_")[0] in words}
