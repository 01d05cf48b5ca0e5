"""The installed package: its version, what importing it costs and needs, and who reads the environment."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast as nc

PACKAGE = Path(nc.__file__).resolve().parent

# Of PyTorch's modules, what `import torch` leaves out: nothing that takes time, such as the compiler or sympy.
LIGHT = {"torch._custom_class_base", "torch._opaque_base", "torch.utils._device"}


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_matches_the_installed_metadata() -> None:
    try:
        installed = importlib.metadata.version("narrowcast")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs an installed narrowcast: this run takes it from the source folder")
    assert nc.__version__ == installed


def test_every_public_name_exists() -> None:
    missing = [name for name in nc.__all__ if not hasattr(nc, name)]
    assert not missing
    assert len(set(nc.__all__)) == len(nc.__all__)


# What importing PyTorch says is its own; what is said after it is ours. Loggers that have no handler write to stderr.
SILENT = """
import logging, sys, warnings
import torch
warnings.simplefilter("always")
logging.captureWarnings(True)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
print("torch is there", flush=True)
print("torch is there", file=sys.stderr, flush=True)
import narrowcast
model = narrowcast.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), "delayed")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(32, 64)).sum().backward()
optimizer.step()
model.load_state_dict(model.state_dict())
"""


@pytest.mark.parametrize("before", ["", "import sys; sys.modules['numpy'] = None"], ids=["numpy", "no numpy"])
def test_import_and_a_step_are_silent(before: str) -> None:
    """Not a line on stdout, on stderr, or of any logger, PyTorch's included: pytest itself cannot see the latter."""
    done = subprocess.run(
        [sys.executable, "-c", before + SILENT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for stream in (done.stdout, done.stderr):
        assert stream.partition("torch is there\n")[2] == ""


def test_import_again() -> None:
    """Reloaded, and after its modules were deleted, as notebooks do: no warning, and what is new works."""
    run_python(
        "-c",
        "import importlib, sys, warnings, torch, narrowcast as nc\n"
        "first = importlib.reload(nc)\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'narrowcast']:\n"
        "    del sys.modules[name]\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('error')\n"
        "    import narrowcast as nc\n"
        "assert nc is not first\n"
        "layer = nc.Linear(32, 32, device='cpu', recipe=nc.recipe.MXFP8BlockScaling())\n"
        "layer(torch.ones(4, 32)).sum().backward()\n"
        "assert layer.weight.grad is not None\n",
    )


# Plain PyTorch of several kinds, run once before the import and once after it.
PLAIN = """
import copy, pickle, warnings
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 5))

def loss(net, x):
    return net(x).square().mean()

def eager(net, x):
    loss(net, x).backward()

def compiled(net, x):
    torch.compile(loss, backend="aot_eager", fullgraph=True)(net, x).backward()

def compiled_autograd(net, x):
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(eager, backend="aot_eager")(net, x)

def functional(net, x):
    parameters = dict(net.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)).square().mean())(parameters)
    for name, grad in grads.items():
        parameters[name].grad = grad
    torch.func.jvp(net, (x,), (x,))
    torch.func.vmap(net)(x)

def checkpointed(net, x):
    torch.utils.checkpoint.checkpoint(loss, net, x, use_reentrant=False).backward()

def copied(net, x):
    other = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    loss(other, x).backward()
    net.load_state_dict(other.state_dict())
    for p, q in zip(net.parameters(), other.parameters()):
        p.grad = q.grad

def exported(net, x):
    loss(torch.export.export(net, (x,)).module(), x)
    eager(net, x)

def run(program):
    torch._dynamo.reset()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for seed in range(2):
        torch.manual_seed(seed)
        program(net, torch.randn(11, 7))
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]

PROGRAMS = (eager, compiled, compiled_autograd, functional, checkpointed, copied, exported)
before = [run(program) for program in PROGRAMS]
import narrowcast
warnings.simplefilter("error", UserWarning)
for program, wanted in zip(PROGRAMS, before):
    assert all(map(torch.equal, run(program), wanted)), program.__name__
"""


def test_import_changes_nothing_for_plain_pytorch() -> None:
    run_python("-c", PLAIN)


def test_import_and_cpu_step_without_triton() -> None:
    """None in sys.modules makes `import triton` fail as on a machine that lacks it."""
    run_python(
        "-c",
        "import sys; sys.modules['triton'] = None\n"
        "import torch, narrowcast as nc\n"
        "layer = nc.Linear(32, 32, device='cpu')\n"
        "with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()):\n"
        "    layer(torch.ones(4, 32)).sum().backward()\n"
        "assert layer.weight.grad is not None\n",
    )


def test_import_loads_nothing_that_it_does_not_need() -> None:
    """Beyond `import torch`: its own modules, Python's, and a few small ones of PyTorch; a third of a second in all."""
    output = run_python(
        "-c",
        "import sys, torch\n"
        "loaded = set(sys.modules)\n"
        "import narrowcast\n"
        "print(*sorted(set(sys.modules) - loaded))\n",
    )
    modules = set(output.split()) - LIGHT
    others = {
        name for name in modules if name.partition(".")[0] not in {"narrowcast", *sys.stdlib_module_names}
    }
    assert not others, f"import narrowcast also imports {sorted(others)}"


def environment_reads(path: Path) -> list[int]:
    """Lines that name os.environ or os.getenv, or import them."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        imported = isinstance(node, ast.ImportFrom) and node.module == "os"
        if attribute or (imported and any(alias.name in ("environ", "getenv") for alias in node.names)):
            lines.append(node.lineno)
    return lines


def test_only_one_file_reads_the_environment() -> None:
    readers = {
        path.relative_to(PACKAGE.parent).as_posix(): lines
        for path in PACKAGE.parent.glob("narrowcast*/**/*.py")
        if (lines := environment_reads(path))
    }
    # the command sets a variable before anything imports PyTorch, and the library with it
    assert set(readers) == {
        "narrowcast/_environment.py",
        "narrowcast_tools/cli/__init__.py",
        "narrowcast_tools/cli/threads.py",
    }


@pytest.mark.parametrize(
    "source", ["import os\nos.getenv('A')", "import os as o\no.environ['A']", "from os import environ"]
)
def test_the_environment_check_sees_a_read(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert environment_reads(path)


def test_a_misspelt_variable_is_told_at_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NARROWCAST_EMULAT", "NARROWCAST_INLINE", "NARROWCAST_DEMO", "NVTE_FLASH_ATN"):
        monkeypatch.setenv(name, "1")
    code = "import torch\n\nimport narrowcast\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    (told,) = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert told == (
        "<string>:3: UserWarning: nothing reads the environment variable 'NARROWCAST_EMULAT'; did you mean "
        "NARROWCAST_EMULATE?"
    )


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_reloading_one_module_of_operators() -> None:
    """A library takes an operator's definition once."""
    run_python(
        "-c",
        "import importlib, sys, torch, narrowcast as nc\n"
        "names = [name for name in sys.modules if name.startswith('narrowcast.functional.')]\n"
        "names = [name for name in names if not name.rpartition('.')[2].startswith('_')]\n"
        "for name in names:\n"
        "    importlib.reload(sys.modules[name])\n"
        "assert len(names) > 10\n"
        "layer = nc.Linear(32, 32, device='cpu', recipe=nc.recipe.MXFP8BlockScaling())\n"
        "layer(torch.ones(4, 32)).sum().backward()\n"
        "assert layer.weight.grad is not None\n",
    )


# torch's makers whose dtype the default decides, whatever they are given; arange does so for floats.
MAKERS = {
    *(
        "as_tensor",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randn",
    ),
    *(
        "scalar_tensor",
        "tensor",
        "zeros",
        "hann_window",
        "hamming_window",
        "kaiser_window",
        "blackman_window",
    ),
}


def makes_default_dtype(node: ast.AST) -> bool:
    """Whether a tensor is made whose dtype follows ``torch.set_default_dtype``; keywords passed on may have one."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
        return False
    if {"dtype", None} & {keyword.arg for keyword in node.keywords}:
        return False
    floats = any(
        (isinstance(part, ast.Constant) and isinstance(part.value, float)) or isinstance(part, ast.Div)
        for argument in node.args
        for part in ast.walk(argument)
    )
    return node.func.attr in MAKERS or (node.func.attr == "arange" and floats)


def test_no_tensor_is_made_in_the_default_dtype() -> None:
    """Under ``torch.set_default_dtype(torch.bfloat16)`` a step count made so would end at 256."""
    made = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"
        for path in PACKAGE.parent.glob("narrowcast*/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if makes_default_dtype(node)
    ]
    assert not made, f"give a dtype: {', '.join(sorted(made))}"
    assert makes_default_dtype(ast.parse("torch.zeros(3)").body[0].value)  # type: ignore[attr-defined]
    assert not makes_default_dtype(ast.parse("torch.arange(3)").body[0].value)  # type: ignore[attr-defined]
