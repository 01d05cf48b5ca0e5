"""A pytest plugin that notes which launches tests make: ``make kernels`` compiles these for GPUs that are not here.

    pytest -p tests.kernels.record_launches tests/kernels

writes ``tests/kernels/launches.json``: by kernel, the kinds of its arguments and the constants, as Triton tells them
apart. Sizes beside 1 are not kept, only whether 16 divides them: they make no other variant. Kernels that the tests do
not launch keep their lines; remove those of a kernel that is gone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).with_name("launches.json")

_seen: dict[str, set[str]] = {}
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e8m0fnu: "u8",
    torch.uint32: "u32",
    torch.uint64: "u64",
}


def kind_of(argument: Any) -> str:
    """Return how Triton's signature names an argument, ``:16`` where it is a multiple of 16, ``=`` a constant."""
    if isinstance(argument, torch.Tensor):
        aligned = argument.data_ptr() % 16 == 0
        return f"*{_TYPES[argument.dtype]}{':16' if aligned else ''}"
    if argument is None or argument is True or argument is False:
        return f"={argument}" if argument is None else "i1"
    if isinstance(argument, int):
        if argument == 1:
            return "=1"
        wide = not -(2**31) <= argument < 2**31
        return f"{'i64' if wide else 'i32'}{':16' if argument % 16 == 0 else ''}"
    if isinstance(argument, float):
        return "fp32"
    raise TypeError(f"no kind of {type(argument)}")


def note(launcher: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    """Add a launch to what was seen."""
    function = getattr(launcher.kernel, "fn", None)
    if function is None:
        return  # a test's own
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    warps = launcher.num_warps
    options = {key: value for key, value in launcher.options.items() if key != "enable_fp_fusion"}
    record = [warps, options, [kind_of(argument) for argument in arguments], list(constants)]
    _seen.setdefault(name, set()).add(json.dumps(record))


def pytest_configure() -> None:
    from narrowcast.kernels import launch

    really = launch.Launcher.__call__

    def call(self: Any, grid: Any, arguments: Any, constants: Any) -> Any:
        if not isinstance(arguments[0], torch.Tensor) or not launch.is_traced(arguments[0]):
            note(self, arguments, constants)
        return really(self, grid, arguments, constants)

    launch.Launcher.__call__ = call  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    kept = {
        name: [json.dumps(record) for record in records]
        for name, records in json.loads(PATH.read_text()).items()
    }
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(sorted(records)) + "\n]"
        for name, records in sorted({**kept, **_seen}.items())
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
