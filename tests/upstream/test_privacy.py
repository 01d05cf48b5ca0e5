"""Private names of PyTorch and Triton are used in ``narrowcast/upstream`` alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import narrowcast

SOURCE = Path(narrowcast.__file__).parents[1]
ALL = sorted(SOURCE.glob("narrowcast*/**/*.py"))
FILES = [path for path in ALL if "upstream" not in path.parts]

DOCUMENTED = {
    # docs.pytorch.org/docs/stable/torch.html#foreach-operations
    re.compile(r"torch\._foreach_\w+"),
    # docs.pytorch.org/docs/stable/generated/torch._check.html
    re.compile(r"torch\._check(_is_size)?"),
    # docs.pytorch.org/docs/stable/torch.compiler_ir.html, operators of the Core ATen IR
    re.compile(r"torch\.ops\.aten\._to_copy(\.default)?"),
}
"""Names that PyTorch documents in spite of their underscore."""

LEFT: dict[str, str] = {}
"""Files that are still to move, with their owner."""

OWNERS = ("torch", "triton", "transformers", "accelerate", "peft", "safetensors")
PRIVATE_NAMESPACES = ("torch.ops.fsdp", "torch.ops.symm_mem")
FRAMES = {
    "_getframe",
    "_current_frames",
    "f_locals",
    "f_globals",
    "f_back",
    "getclosurevars",
    "__closure__",
    "cell_contents",
}
FRAMES |= {"tb_frame", "gi_frame"}
THEIRS = {
    "_version",
    "_local_tensor",
    "_cdata",
    "_parameters",
    "_buffers",
    "_modules",
    "_schema",
    "_orig_mod",
    "_base",
}
BY_TABLE = {"_apply_gate", "_data", "_amax_rowwise"}
"""Our own fields that no statement names, and what a module of Transformers has that our layer takes the place of."""
NODE_META = {
    "val",
    "recompute",
    "saved_tensor_with_no_vc_check",
    "tensor_meta",
    "nn_module_stack",
    "stack_trace",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names() -> set[str]:
    """Underscored names that narrowcast defines somewhere: fields, methods, functions, keywords, slots."""
    found: set[str] = set()
    for path in ALL:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
                "__setattr__",
                "setdefault",
            ):
                found |= {
                    arg.value
                    for arg in node.args
                    if isinstance(arg, ast.Constant) and str(arg.value)[:1] == "_"
                }
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                table = node.value
                if (
                    getattr(table, "attr", "") == "__dict__"
                    or getattr(getattr(table, "func", None), "id", "") == "vars"
                ):
                    found.add(getattr(node.slice, "value", ""))
    return BY_TABLE | {name for name in found if isinstance(name, str) and is_private(name)}


class Finder(ast.NodeVisitor):
    """Collects the private names that one file uses, as ``line: what``."""

    def __init__(self, own: set[str], theirs: set[str]) -> None:
        self.own = own
        self.theirs = theirs
        self.roots: dict[str, str] = {}
        self.found: list[str] = []

    def note(self, node: ast.AST, what: str) -> None:
        if not any(pattern.fullmatch(what) for pattern in DOCUMENTED):
            self.found.append(f"{node.lineno}: {what}")  # type: ignore[attr-defined]

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in OWNERS:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self.roots[alias.asname or name] = name
                if any(map(is_private, alias.name.split("."))):
                    self.note(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").split(".")[0] not in OWNERS:
            return
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            self.roots[alias.asname or alias.name] = path
            if any(map(is_private, path.split("."))):
                self.note(node, path)

    def visit_Assign(self, node: ast.Assign) -> None:
        """``aten = torch.ops.aten``: what is reached through the new name is theirs, too."""
        pairs = [(target, node.value) for target in node.targets]
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts, strict=False)
            path = self.path(value)
            if isinstance(target, ast.Name) and path and path.split(".")[0] in OWNERS:
                self.roots[target.id] = path
        self.generic_visit(node)

    def path(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.roots.get(node.id)
        if isinstance(node, ast.Attribute):
            of = self.path(node.value)
            return of and f"{of}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path(node)
        if path is not None:
            if any(map(is_private, path.split(".")[1:])) or path.startswith(PRIVATE_NAMESPACES):
                self.note(node, path)
            return
        if node.attr in FRAMES or self.is_theirs(node.attr):
            self.note(node, f"….{node.attr}")
        self.generic_visit(node)

    def is_theirs(self, name: str) -> bool:
        return name in self.theirs or name in FRAMES or (is_private(name) and name not in self.own)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "meta":
            key = node.slice
            if isinstance(key, ast.Constant) and key.value in NODE_META:
                self.note(node, f"node.meta[{key.value!r}]")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "get", "pop"):
            for argument in node.args:
                name = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(name, str) and name.isidentifier() and self.is_theirs(name):
                    self.note(argument, f"….{name}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        theirs = r"(torch|triton)([./]\w+)*[./]_(?!_)\w+([./]\w*)*"
        if isinstance(node.value, str) and re.fullmatch(theirs, node.value):
            self.note(node, node.value)


def private_names(text: str, own: set[str]) -> list[str]:
    tree = ast.parse(text)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    finder = Finder(own | defined, THEIRS - defined)
    finder.visit(tree)
    return finder.found


@pytest.fixture(scope="module")
def own() -> set[str]:
    return own_names()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_uses_no_private_name(path: Path, own: set[str]) -> None:
    found = private_names(path.read_text(), own)
    name = str(path.relative_to(SOURCE))
    assert not found or name in LEFT, f"move to narrowcast/upstream: {found}"


def test_the_list_of_files_left_names_files() -> None:
    assert set(LEFT) <= {str(path.relative_to(SOURCE)) for path in FILES}


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._C import thing",
        "from torch.utils.checkpoint import _Mode",
        "import torch\ntorch._scaled_mm(x)",
        "import torch\nops = torch.ops\nops._c10d_functional.wait_tensor(x)",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
        "import torch\naten, fsdp = torch.ops.aten, torch.ops.fsdp\naten._private(x)",
        "getattr(module, '_is_fsdp_managed_module', False)",
        "x._local_tensor",
        "x.untyped_storage()._cdata",
        "weight._version",
        "node.meta['recompute'] = 1",
        "import sys\nsys._getframe(1)",
        "frame.f_locals['ctx']",
        "import inspect\ninspect.getclosurevars(f)",
        "f.__closure__",
        "context._i_will_not_complain_if_bc_breaks_InstructionTranslator()",
        "'torch._inductor.config' in modules",
        "name.startswith('torch/_functorch/_aot_autograd/')",
        "import triton.language as tl\nfrom triton.runtime import _allocation",
    ],
)
def test_finds_private_names(text: str) -> None:
    assert private_names(text, own={"_held", "_parameters"})


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._foreach_mul(a, b)\ntorch._check(rows >= 0)",
        "import torch\ntorch.__version__",
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "self._held = x\nother._held",
        "found.meta['settings']",
        "'torch._dynamo.config.x is not set; set it'",
    ],
)
def test_lets_documented_and_own_names_be(text: str) -> None:
    assert not private_names(text, own={"_held"})


def test_operators_of_fsdp_are_private_by_their_namespace() -> None:
    assert private_names("import torch\nx = torch.ops.fsdp\nx.chunk_cat", own=set())
