"""What a parameter is across ranks stands in its record; serving and conversion do not ask the tensor again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import narrowcast

SOURCE = Path(narrowcast.__file__).parent
ROOMS = ("serving", "convert")
EXCEPTIONS = {
    "convert/experts.py:StackedExpertsLayer._parts_of": "a forward: the experts that this rank multiplies with",
    "convert/experts.py:StackedExpertsLayer._stored": "a forward, too",
    "convert/recording.py:NamedWeight.address": "an operand of a GEMM that ran",
    "convert/recording.py:codes_of": "an operand of a GEMM that ran",
    "convert/find.py:_why_not_any": "refuses what is sharded before it is converted",
    "convert/adapters.py:_merged_weight": "of a forward, too; a merge on ranks has asked the record before",
    "convert/adapters.py:_merge_keeping_codes": "PEFT's own merge, in one process",
    "convert/adapters.py:_unmerge_to_codes": "PEFT's own merge, in one process",
    "convert/stored.py:store": "a weight that convert found, which is no DTensor",
    "serving/matrices.py:_stored": "this rank's part, which the record has unwrapped",
    "serving/decompose.py:decompose": "constants of an exported program",
}
"""File and function -> why it looks at the tensor itself."""


def looks(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the function around each question whether a tensor is a DTensor or quantized, and its line."""

    def visit(node: ast.AST, around: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            around = (*around, node.name)
        asks = isinstance(node, ast.Attribute) and node.attr == "to_local"
        asks |= isinstance(node, ast.Constant) and node.value == "to_local"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asks = "QuantizedTensor" in {
                one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)
            }
        if asks:
            yield ".".join(around), node.lineno  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, around)

    return visit(ast.parse(path.read_text()), ())


def test_serving_and_conversion_read_the_record() -> None:
    used, found = set(), []
    for path in (path for room in ROOMS for path in sorted((SOURCE / room).rglob("*.py"))):
        file = path.relative_to(SOURCE).as_posix()
        for function, line in looks(path):
            place = f"{file}:{function}"
            used.update({place} & set(EXCEPTIONS))
            if place not in EXCEPTIONS:
                found.append(f"{place}, line {line}")
    assert not found, "use narrowcast.distributed.describe_parameter, or say here why not"
    assert used == set(EXCEPTIONS)


def test_the_lint_sees_each_spelling(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    lines = [
        "w.to_local()",
        'hasattr(w, "to_local")',
        "isinstance(w, (A, QuantizedTensor))",
        "isinstance(w, A)",
    ]
    file.write_text("\n".join(lines))
    assert [line for _, line in looks(file)] == [1, 2, 3]
