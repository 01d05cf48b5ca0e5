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
ABSENT_THERE = "Absent submodules and names in submodules"
PUBLIC = Path(__file__).with_name("transformer_engine_2_20_2.txt")
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
    lines = [line for line in section.splitlines() if line.startswith(("| `", "| (root)"))]
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


def test_every_public_name_of_the_release_is_there_or_has_a_reason() -> None:
    listed = set(re.findall(r"`([^`\n]+)`", PAGE.read_text().split("## Every name\n")[1]))
    for line in PUBLIC.read_text().splitlines():
        if line.startswith("#"):
            continue
        module, _, all_names = line.replace("(root)", "").partition(": ")
        if module not in MODULES:  # absent as a whole
            assert module.rpartition(".")[2] in ABSENT and module in listed, module
            continue
        missing = set(all_names.split()) - set(MODULES[module])
        assert missing <= set(ABSENT), (module, missing - set(ABSENT))
        assert set(all_names.split()) <= listed, (module, set(all_names.split()) - listed)


def test_what_is_absent_in_submodules_has_a_reason() -> None:
    for where, what, *_ in rows(ABSENT_THERE):
        for module in names(where) or [""]:
            if what == "all":
                owner, _, name = module.rpartition(".")
                assert owner in MODULES and module not in MODULES and name in ABSENT, module
            for name in names(what):
                assert name not in MODULES[module] and name in ABSENT, (module, name)


def test_reasons_are_of_names_that_are_absent() -> None:
    exists = {name for module in MODULES.values() for name in module}
    assert not exists & set(ABSENT)
    for reason in ABSENT.values():  # what a reason sends its reader to is there
        for path in re.findall(r"\bnarrowcast((?:\.\w+)+)", reason):
            reduce(getattr, path.strip(".").split("."), nc)
