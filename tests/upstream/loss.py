"""What narrowcast does on a release that lacks a private name, tried in a process of its own for each name.

``outcomes(names, "file.py:function")`` imports torch once and forks for each name. A child hides the name before the
rest of narrowcast is imported, calls the function, and reports a digest of the tensors that it returns, or its error.
:func:`is_stated` says whether that is what an entry promises: the same bits, or an ``UpstreamError``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


def outcomes(
    names: Iterable[str], scenario: str, wanted_modules: Iterable[str] = ("torch",), timeout: float = 600
) -> dict[str, str]:
    """Return ``{name: outcome}``, and under ``""`` the outcome with nothing hidden.

    Args:
        names: of entries.
        scenario: "path/of/file.py:function"; the function takes nothing and returns tensors.
        wanted_modules: imported once, before the children part.
        timeout: seconds, for all of them.
    """
    given = json.dumps([["", *names], scenario, [*wanted_modules]])
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__],
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def is_stated(name: str, found: dict[str, str]) -> bool:
    """Return whether the loss of a name led to the same bits or to the error that names it."""
    assert found[""].startswith("bits"), found[""]
    return found[name] == found[""] or (
        "UpstreamError" in found[name] and name.rpartition(".")[2] in found[name]
    )


def _outcome(name: str, scenario: str) -> str:
    """Run in a child: hide the name, import narrowcast, call the scenario."""
    file, function = scenario.split(":")
    try:
        _hide(name)
        spec = importlib.util.spec_from_file_location("scenario", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["scenario"] = module
        spec.loader.exec_module(module)
        return _digest(getattr(module, function)())
    except BaseException:
        return traceback.format_exc()


def _hide(name: str) -> None:
    stub = types.ModuleType("narrowcast")  # so that its room for private names is imported before the rest
    stub.__path__ = [str(SOURCE / "narrowcast")]
    sys.modules["narrowcast"] = stub
    from narrowcast.upstream.private import HIDDEN

    del sys.modules["narrowcast"]
    if name:
        HIDDEN.add(name)


def _digest(tensors: Any) -> str:
    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().contiguous().reshape(-1)
        found.update(f"{plain.dtype} {plain.numel()}".encode())
        found.update(bytes(plain.view(torch.uint8).tolist()))
    return f"bits {found.hexdigest()}"


def _in_child(name: str, scenario: str) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.dup2(2, 1)  # prints of the scenario do not mix with the answer
        os.write(writing, _outcome(name, scenario)[-60000:].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer or "the process ended without an answer"


if __name__ == "__main__":
    names, scenario, modules = json.loads(sys.stdin.read())
    for module in modules:
        importlib.import_module(module)
    found = {}
    for name in names:
        found[name] = _in_child(name, scenario)
        print(name, found[name][-200:], file=sys.stderr, flush=True)
    print(json.dumps(found))
