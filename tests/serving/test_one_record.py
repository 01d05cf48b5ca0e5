"""What a parameter is across ranks stands in its record; who saves, serves or converts it does not ask the tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import narrowcast

SOURCE = Path(narrowcast.__file__).parent
ROOMS = ("serving", "convert", "distributed")
UNWRAPS = ("to_local", "full_tensor", "_local_tensor")
TYPES = {"QuantizedTensor", "DequantizingTensor", "DTensor"}
EXCEPTIONS = {
    "convert/experts.py:StackedExpertsLayer._parts_of": "a forward: the experts that this rank multiplies with",
    "convert/experts.py:StackedExpertsLayer._stored": "a forward, too",
    "convert/recording.py:NamedWeight.address": "an operand of a GEMM that ran",
    "convert/recording.py:codes_of": "an operand of a GEMM that ran",
    "convert/find_modules.py:_why_not_any": "refuses what is sharded before it is converted",
    "convert/convert.py:revert": "whether there is anything to describe",
    "distributed/parallel_styles.py:_local_input": "what comes to a layer, to which it sends rows and columns",
    "distributed/parallel_styles.py:_placed_output": "what a layer gives, the same",
    "distributed/shard.py:_check_stored": "makes shards, which groups of tensors have none of",
    "distributed/shard.py:_Chosen.wrap": "the same",
    "distributed/sharded_weight.py:ShardedWeight.fsdp_post_all_gather": "the collective: what FSDP2 gathers into",
    "distributed/weight_scales.py:ScaledWeight.shard": "a forward: what the collective reduces before each",
    "serving/decompose.py:decompose": "constants of an exported program",
}
"""File and function -> why it looks at the tensor itself."""


def looks(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the function around each look at whether a tensor is a DTensor or quantized, or into one, and its line."""

    def visit(node: ast.AST, around: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            around = (*around, node.name)
        asks = isinstance(node, ast.Attribute) and node.attr in UNWRAPS
        asks |= isinstance(node, ast.Constant) and node.value in UNWRAPS
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            kinds = {
                one.id if isinstance(one, ast.Name) else one.attr
                for given in node.args[1:]
                for one in ast.walk(given)
                if isinstance(one, (ast.Name, ast.Attribute))
            }
            asks |= called in ("is_distributed", "local", "local_part", "spread_like")
            asks |= called == "isinstance" and bool(kinds & TYPES)
        if asks:
            yield ".".join(around), node.lineno  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, around)

    return visit(ast.parse(path.read_text()), ())


def test_serving_and_conversion_read_the_record() -> None:
    used, found = set(), []
    files = [path for room in ROOMS for path in sorted((SOURCE / room).rglob("*.py"))]
    for path in files:
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
        "isinstance(w, DTensor)",
        "is_distributed(w)",
        "local(w)",
        "tensors.local(w)",
        "w.full_tensor()",
        'getattr(w, "full_tensor")',
        "isinstance(w, A)",
    ]
    file.write_text("\n".join(lines))
    assert [line for _, line in looks(file)] == list(range(1, len(lines)))
