"""The device of a run, and what compiling and replaying need of it."""

import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from narrowcast import _environment as environment
from narrowcast.upstream.compiler import is_failure_of_compiler

from ..words import AUTO
from .errors import SettingsError, TrainingError
from .names import device_word

CPP_COMPILERS = ("g++", "clang++", "c++")
SHOWN = 90  # characters of a line of the compiler


def resolve_device(word: str) -> str:
    """Turn `auto`, `cpu` or `cuda` into the device type to use.

    Raises:
        SettingsError: the word is unknown, or CUDA was requested and is absent.
    """
    if device_word(word) == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if word == "cuda" and not torch.cuda.is_available():
        fix = "install a CUDA build of torch"
        if torch.version.cuda:
            fix = "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        raise SettingsError(
            f"--device is cuda, but torch {torch.__version__} finds no CUDA device; use --device cpu, or {fix}"
        )
    return word


def require_compiler(device: str) -> None:
    """Check that `torch.compile` finds what it needs.

    Raises:
        SettingsError: the device is the CPU and the machine has no C++ compiler.
    """
    named = environment.read_foreign("CXX")
    if device == "cpu" and not any(shutil.which(name) for name in ([named] if named else CPP_COMPILERS)):
        wanted = named or ", ".join(CPP_COMPILERS)
        raise SettingsError(
            f"--compile needs a C++ compiler on the CPU, and none is on the path ({wanted}); "
            "install g++ or leave --compile out"
        )


@contextmanager
def compiler_told() -> Iterator[None]:
    """Re-raise the compiler's errors, with hundreds of lines of traceback, as ``TrainingError``.

    PyTorch's own TORCHDYNAMO_VERBOSE=1 keeps them.

    Raises:
        TrainingError: compiling failed; the message has the first lines that name an error.
    """
    try:
        yield
    except RuntimeError as error:
        if environment.read_foreign("TORCHDYNAMO_VERBOSE") == "1" or not is_failure_of_compiler(error):
            raise
        told = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]
        lines = [line for line in map(str.strip, told.splitlines()) if line]
        named = [line for line in lines if "error" in line.lower()] or lines
        shown = " ".join(textwrap.shorten(line, SHOWN, placeholder="...") for line in named[:2])
        raise TrainingError(
            f"--compile failed: {shown}; leave --compile out, or set TORCHDYNAMO_VERBOSE=1 to see the traceback"
        ) from error
