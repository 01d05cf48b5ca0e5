"""What a parameter is across ranks stands in its record; who saves, serves or converts it does not ask the tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import narrowcast

SOURCE = Path(narrowcast.__file__).parent
ROOMS = ("serving", "convert", "distributed")
FORWARDS = (
    *("expert_sharding", "gather_in_place", "micro_pipeline", "moe_dispatch", "moe_exchange"),
    *("gradient_exchange", "parallel_styles", "shard", "sharded_weight", "stand_in", "weight_scales"),
)
"""Files of ``distributed`` that make what ranks share, or compute with it."""
EXCEPTIONS = {
    "convert/experts.py:StackedExpertsLayer._parts_of": "a forward: the experts that this rank multiplies with",
    "convert/experts.py:StackedExpertsLayer._stored": "a forward, too",
    "convert/recording.py:NamedWeight.address": "an operand of a GEMM that ran",
    "convert/recording.py:codes_of": "an operand of a GEMM that ran",
    "convert/find.py:_why_not_any": "refuses what is sharded before it is converted",
    "convert/convert.py:revert": "whether there is anything to describe",
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
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            kinds = {
                one.id if isinstance(one, ast.Name) else one.attr
                for given in node.args[1:]
                for one in ast.walk(given)
                if isinstance(one, (ast.Name, ast.Attribute))
            }
            asks |= node.func.id == "is_distributed"
            asks |= node.func.id == "isinstance" and bool(kinds & {"QuantizedTensor", "DequantizingTensor"})
        if asks:
            yield ".".join(around), node.lineno  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, around)

    return visit(ast.parse(path.read_text()), ())


def test_serving_and_conversion_read_the_record() -> None:
    used, found = set(), []
    files = [path for room in ROOMS for path in sorted((SOURCE / room).rglob("*.py"))]
    assert not set(FORWARDS) - {path.stem for path in files}
    for path in (path for path in files if path.stem not in FORWARDS):
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
        "isinstance(w, DequantizingTensor)",
        "isinstance(w, nc.QuantizedTensor)",
        "is_distributed(w)",
        "isinstance(w, A)",
    ]
    file.write_text("\n".join(lines))
    assert [line for _, line in looks(file)] == [1, 2, 3, 4, 5, 6]
