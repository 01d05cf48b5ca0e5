"""Count what the house has more than one of: interpreters' calls, caches, questions to the compiler, facts, lines.

usage: python tools/census.py        (prints one Markdown table; no GPU is needed)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import narrowcast as nc
from narrowcast.compat.names import MODULES
from narrowcast.functional import replay

SOURCE = Path(nc.__file__).parent
DTYPES = {"float32", "bfloat16", "float16"}
# What is only, or mainly, for delayed scaling: whole files, or classes, functions and methods of a file.
DELAYED: dict[str, tuple[str, ...]] = {
    "autograd/arguments.py": ("DelayedScales",),
    "compat/checkpoint.py": ("_extra_state",),
    "compat/global_state.py": ("FP8GlobalStateManager.reduce_and_update_fp8_tensors",),
    "functional/delayed_scaling.py": (),
    "kernels/delayed.py": (),
    "kernels/first_scale.py": (),
    "layers/delayed.py": (),
    "layers/extra_state.py": (),
    "layers/renewal.py": (),
    "recipe/delayed.py": (),
    "reference/delayed.py": (),
    "state/delayed_scaling.py": (),
    "state/recipe_state.py": (
        "RecipeState.delayed_slots",
        "RecipeState.follows",
        "RecipeState.inherit_state_from",
        "RecipeState._with_state",
        "RecipeState._keep_new",
        "DelayedScalingRecipeState",
    ),
}


def files() -> Iterator[tuple[Path, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, path.read_text()


def lines() -> int:
    return sum(text.count("\n") for _, text in files())


def delayed_lines() -> int:
    """Lines of what ``DELAYED`` names; a name that is not there is an error."""
    total = 0
    for file, names in DELAYED.items():
        text = (SOURCE / file).read_text()
        if not names:
            total += text.count("\n")
        for name in names:
            body: list[ast.stmt] = ast.parse(text).body
            for part in name.split("."):
                node = next(one for one in body if getattr(one, "name", None) == part)
                body = getattr(node, "body", [])
            total += (node.end_lineno or 0) - node.lineno + 1
    return total


def statements() -> int:
    trees = [ast.parse(text) for _, text in files()]
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def matches(pattern: str) -> int:
    return sum(len(re.findall(pattern, text, re.MULTILINE)) for _, text in files())


def caches() -> int:
    return matches(r"^(?:@|\w+ = )(?:functools\.)?(?:lru_)?cache\b")


def questions() -> int:
    return matches(r"is_compiling\(\)")


def numerics_of(path: Path) -> dict[str, ast.FunctionDef]:
    """The public functions of a file by name, without device code and checks of arguments."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    on_host = [node for node in nodes if not any("jit" in ast.unparse(name) for name in node.decorator_list)]
    return {node.name: node for node in on_host if not node.name.startswith(("_", "check"))}


def twins() -> dict[str, tuple[ast.FunctionDef, ast.FunctionDef]]:
    """Functions that reference and kernels have under one name, by file and name."""
    found = {}
    for path in sorted((SOURCE / "reference").glob("*.py")):
        kernel = SOURCE / "kernels" / path.name
        if kernel.exists():
            ours, theirs = numerics_of(path), numerics_of(kernel)
            found |= {f"{path.stem}.{name}": (ours[name], theirs[name]) for name in ours if name in theirs}
    return found


ENCODING = {"encode", "_encode", "_encode_scaled", "_encode_again", "_encode_keeping_amax", "_amax_to_share"}


def ways_to_quantize() -> list[str]:
    """Functions of functional/ that call the numerics of a quantizer; every quantizing operator is made of one of them.

    A call is one of a quantizer's encoding methods, of ``encode``, which chooses among them, or of ``quantize`` of the
    numerics. Methods do not count: through them a quantizer sees numerics that work on groups.
    """
    found = []
    for path, text in files():
        if path.parent.name != "functional":
            continue
        tree = ast.parse(text)
        for node in (
            inner for outer in tree.body if not isinstance(outer, ast.ClassDef) for inner in ast.walk(outer)
        ):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)) and _encodes(node):
                found.append(f"{path.stem}.{getattr(node, 'name', f'lambda in line {node.lineno}')}")
    return found


def _encodes(function: ast.AST) -> bool:
    """Whether a function itself, not one inside it, calls the numerics of a quantizer."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, (ast.FunctionDef, ast.Lambda)):
            continue
        called = child.func if isinstance(child, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        if name in ENCODING or (
            name in ("quantize", "quantize_current") and isinstance(called, ast.Attribute)
        ):
            return True
        if _encodes(child):
            return True
    return False


def dtype_sets() -> int:
    """Tuples that name the three dtypes which layers take, outside of messages."""
    found = 0
    for _, text in files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Tuple) and len(node.elts) == 3:
                found += {getattr(item, "attr", None) for item in node.elts} == DTYPES
    return found


def wide_functions() -> dict[str, int]:
    """Functions of more than 12 arguments, and how many; no device code, and no name of Transformer Engine."""
    theirs = {name for names in MODULES.values() for name in names}
    found = {}
    for path, text in files():
        for node in ast.walk(ast.parse(text)):
            for one in getattr(node, "body", []) if isinstance(node, (ast.Module, ast.ClassDef)) else []:
                owner = getattr(node, "name", "")
                if not isinstance(one, ast.FunctionDef) or (owner or one.name) in theirs:
                    continue
                given = one.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - bool(owner)
                if count > 12 and not any("jit" in ast.unparse(name) for name in one.decorator_list):
                    found[f"{path.relative_to(SOURCE)}:{owner}{'.' if owner else ''}{one.name}"] = count
    return found


def longest_files() -> str:
    sizes = sorted(((text.count("\n"), path) for path, text in files()), reverse=True)
    return ", ".join(f"{path.relative_to(SOURCE)} {count}" for count, path in sizes[:3])


def calls(step: Callable[[], object]) -> int:
    """Python calls of this package's functions in one step, once its plans and caches are there."""
    for _ in range(4):
        step()
    count = 0

    def profile(frame: object, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(str(SOURCE))  # type: ignore[attr-defined]

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def mlp_calls(kind: str, recipe: nc.recipe.Recipe) -> int:
    """Calls of one forward and backward of RMSNorm, linear, SwiGLU, linear, as a module or as a list of operations."""
    if kind == "nn":
        block: torch.nn.Module = nc.LayerNormMLP(
            64, 128, normalization="RMSNorm", activation="swiglu", bias=False, device="cpu"
        )
    else:
        block = nc.ops.Sequential(
            nc.ops.RMSNorm(64, device="cpu"),
            nc.ops.Linear(64, 256, bias=False, device="cpu"),
            nc.ops.SwiGLU(),
            nc.ops.Linear(128, 64, bias=False, device="cpu"),
        )
    nc.set_recipe(block, recipe)
    x = torch.randn(32, 64, requires_grad=True)

    def step() -> None:
        out = block(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    return calls(step)


def rows() -> Iterator[tuple[str, object]]:
    for name, recipe in (("current", nc.recipe.Float8CurrentScaling), ("delayed", nc.recipe.DelayedScaling)):
        counts = [mlp_calls(kind, recipe()) for kind in ("nn", "ops")]
        yield f"calls of an MLP block's forward and backward, {name}: nn, ops", "{}, {}".format(*counts)
    yield "caches (lru_cache, functools.cache)", caches()
    yield "is_compiling()", questions()
    ways = ways_to_quantize()
    yield "ways that operators quantize", f"{len(ways)}: {', '.join(ways)}"
    pairs = twins().values()
    twice = sum("Numerics:" in (ast.get_docstring(kernel) or "") for _, kernel in pairs)
    yield "twins of reference and kernels; described twice", f"{len(pairs)}; {twice}"
    yield "tuples of the three float dtypes", dtype_sets()
    yield "operators", len([name for name in dir(torch.ops.narrowcast) if not name.startswith("_")])
    yield "functions of more than 12 arguments", len(wide_functions())
    yield "lines", lines()
    yield "lines for delayed scaling", delayed_lines()
    yield "statements of these", statements()
    yield "longest files", longest_files()


if __name__ == "__main__":
    replay.ON_CPU = True  # as on a GPU
    print("| what | count |\n| --- | --- |")
    for what, count in rows():
        print(f"| {what} | {count} |")
