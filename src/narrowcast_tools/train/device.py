"""The device of a run, and what compiling and replaying need of it."""

import shutil

import torch

from narrowcast import _environment as environment

from ..words import AUTO
from .errors import SettingsError
from .names import device_word

CPP_COMPILERS = ("g++", "clang++", "c++")


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
