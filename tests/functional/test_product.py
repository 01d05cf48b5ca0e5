"""Products of a forward go through one function, which reads the batch-invariant mode."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import narrowcast

SOURCE = Path(narrowcast.__file__).parent
CALLS = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "tensordot",
    "bilinear",
    "mv",
    "addmv",
}
CALLS |= {"grouped_mm", "scaled_mm", "scaled_grouped_mm"}
OF_TORCH = {"F", "torch", "functional"}

EXCEPTIONS = {
    "reference/": "defines what every product computes",
    "functional/product.py:product": "is the function",
    "functional/gemm.py": "operators of plans; a plan has read the mode, and has other operators in it",
    "functional/grouped_gemm.py": "operators of plans, too",
    "functional/cross_entropy.py:_chunk": "its caller says whether the mode is on",
    "functional/cross_entropy.py:_linear_gradients": "a backward; the mode covers forwards",
    "functional/cross_entropy.py:_product": "of a backward",
    "functional/batch_invariant.py:_matmul_backward": "a backward",
    "functional/batch_invariant.py:_mix_backward": "a backward",
    "kernels/low_rank_products.py": "of a backward: ranks that no kernel takes",
    "autograd/adapter.py:_Inputs.backward": "a backward",
    "autograd/adapter.py:AdaptedLinearFunction.backward": "a backward",
    "autograd/gemms.py:_gradients_in_high_precision": "a backward",
    "attention/unfused.py:_attend": "scores of heads; it reads the mode, and has other operators in it",
    "upstream/cuda.py": "the library's GEMMs of FP8 codes, for functional/gemm.py",
    "nn/linear.py:Linear._as_torch": "runs outside of the mode alone, and saves a call in every forward",
}
"""File, or file and function, -> why it multiplies by itself."""


def products(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the function around each product, and its line."""

    def visit(node: ast.AST, around: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            around = (*around, node.name)
        multiplies = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            multiplies = name in OF_TORCH or node.func.attr in ("mm", "bmm", "addmm")
        if multiplies:
            yield ".".join(around), node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, around)

    return visit(ast.parse(path.read_text()), ())


def test_nothing_else_multiplies() -> None:
    used, found = set(), []
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        for function, line in products(path):
            places = f"{file}:{function}", file, file.partition("/")[0] + "/"
            known = [place for place in places if place in EXCEPTIONS]
            used.update(known)
            if not known:
                found.append(f"{file}:{line} in {function}")
    assert not found, "use narrowcast.functional.product, or say here why not"
    assert used == set(EXCEPTIONS)


def test_the_lint_sees_each_spelling(tmp_path: Path) -> None:
    lines = ["F.linear(x, w)", "x @ w", "torch.einsum('ij,kj->ik', x, w)", "x.mm(w)", "torch.addmm(b, x, w)"]
    file = tmp_path / "one.py"
    file.write_text("\n".join(lines) + "\ny = self.linear(x)  # a @ b\n")
    assert [line for _, line in products(file)] == [1, 2, 3, 4, 5]
