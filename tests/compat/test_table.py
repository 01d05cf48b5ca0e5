"""The tables of docs/from-transformer-engine.md list every present name, and why the others are absent."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import narrowcast as nc
from narrowcast.compat.absent import ABSENT
from narrowcast.compat.names import MODULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-transformer-engine.md"
TABLES = {
    "`transformer_engine.pytorch`": "pytorch",
    "`transformer_engine.common.recipe`": "common.recipe",
    "`transformer_engine.pytorch.ops`": "pytorch.ops",
    "`transformer_engine.pytorch.optimizers`": "pytorch.optimizers",
}
SUBMODULES = "Names of submodules"
# names of narrowcast's own that stand beside Transformer Engine's
OWN = {
    "pytorch.ops": {
        "CompositeOperation",
        "ScaledOperand",
        "unregister_fusion",
        "interleave_glu_tensor",
        "deinterleave_glu_tensor",
    },
    "pytorch.optimizers": {"step_in_backward", "BackwardSteps"},
}


def rows(title: str) -> list[list[str]]:
    section = PAGE.read_text().split(f"### {title}\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_what_is_said_to_be_there_is_there() -> None:
    for title, module in TABLES.items():
        listed = []
        for there, here, *why in rows(title):
            listed += names(there)
            for name in names(there):
                if here == "-":
                    assert name not in MODULES[module] and name in ABSENT and "".join(why), name
                    continue
                place = reduce(getattr, here.strip("`").split(".")[1:], nc)
                if name in ("ops", "optimizers"):
                    assert f"{module}.{name}" in MODULES
                else:
                    assert MODULES[module][name] is getattr(place, name), name
        assert len(listed) == len(set(listed))
        extra = set(MODULES[module]) - set(listed)
        assert extra <= OWN.get(module, set()), extra


def test_submodules() -> None:
    for where, what, *_ in rows(SUBMODULES):
        for module in names(where):
            missing = set(names(what)) - set(MODULES[f"pytorch.{module}"])
            assert not missing, (module, missing)


def test_reasons_are_of_names_that_are_absent() -> None:
    exists = {name for module in MODULES.values() for name in module}
    assert not exists & set(ABSENT)
    for reason in ABSENT.values():  # what a reason sends its reader to is there
        for path in re.findall(r"\bnarrowcast((?:\.\w+)+)", reason):
            reduce(getattr, path.strip(".").split("."), nc)
