"""Dynamo and Inductor, as far as they are asked about without loading them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from .private import entry, private

_MAX_AUTOTUNE = entry(
    "torch._inductor.config.max_autotune",
    follows="torch/_inductor/config.py",
    without="graphs keep GEMMs as operators, with the same bits at a higher cost to the host",
    falls_back=True,
)
_MAX_AUTOTUNE_GEMM = entry(
    "torch._inductor.config.max_autotune_gemm",
    follows="torch/_inductor/config.py",
    without="graphs keep GEMMs as operators, with the same bits at a higher cost to the host",
    falls_back=True,
)
_STATIC_LAUNCH = entry(
    "torch._inductor.config.static_launch_user_defined_triton_kernels",
    follows="torch/_inductor/config.py",
    without="Inductor starts kernels through Triton's launcher, with the same bits at a higher cost to the host",
    falls_back=True,
)
_BUDGET = entry(
    "torch._functorch.config.activation_memory_budget",
    follows="torch/_functorch/config.py",
    without="a receipt does not warn of GEMMs that a memory budget repeats",
    falls_back=True,
)
_COUNTS_ALL = entry(
    "torch._functorch.config.is_non_builtin_to_include",
    follows="torch/_functorch/partitioners.py, get_default_op_list",
    without="a receipt does not warn of GEMMs that a memory budget repeats",
    falls_back=True,
)


entry(
    "torch._dynamo",
    follows="torch/_dynamo/__init__.py",
    without="traced code raises at the first use of upstream/dynamo.py",
)


def repeats_every_gemm() -> bool:
    """Return whether a memory budget of the compiler takes quantized GEMMs for cheap, and repeats them in backwards."""
    is_set = "torch._functorch.config" in sys.modules
    return is_set and _BUDGET.take_or(1.0) < 1 and not _COUNTS_ALL.take_or(True)


def is_dynamo_loaded() -> bool:
    """Return whether anything can have been compiled in this process; for traced code, too."""
    return "torch._dynamo" in sys.modules


_TRACING: Any = private(
    "torch._guards.TracingContext.try_get",
    follows="torch/_guards.py",
    without="a compiled function that reads a tensor of an unregistered quantizer raises, fullgraph or not",
    fallback=lambda: None,
)


NotInGraph: Any = private(
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    follows="torch/_dynamo/utils.py, wrap_fake_exception and run_node",
    without="a compiled function that reads a tensor of an unregistered quantizer raises, fullgraph or not",
    fallback=NotImplementedError,
)
"""What code that the tracer runs raises to have Dynamo end its graph and run that code itself."""


def is_tracer_running() -> bool:
    """Return whether the compiler runs this, on fake tensors, to find out what a graph would compute."""
    return _TRACING() is not None


_FRAMES = "torch/_dynamo/eval_frame.py, skip_code"
_COMPILED_IN_PIECES = (
    "eager operators on quantized tensors beside a graph are compiled in pieces, with graph breaks"
)
_SKIP: Any = private(
    "torch._C._dynamo.eval_frame._FrameAction.SKIP",
    follows=_FRAMES,
    without=_COMPILED_IN_PIECES,
    fallback=None,
)
_STRATEGY: Any = private(
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    follows=_FRAMES,
    without=_COMPILED_IN_PIECES,
    fallback=None,
)
_SET_STRATEGY: Any = private(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    follows=_FRAMES,
    without=_COMPILED_IN_PIECES,
    fallback=None,
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Have Dynamo leave a function alone, with all that it calls.

    A call costs nothing more, unlike one of ``torch.compiler.disable``.
    """
    if _SKIP is not None and _STRATEGY is not None and _SET_STRATEGY is not None:
        code = function.__code__  # type: ignore[attr-defined]
        _SET_STRATEGY(code, _STRATEGY(_SKIP, _SKIP))
    return function


# From 2.13 on the flag holds for a whole compilation (torch/_dynamo/convert_frame.py).
_HOLDS = TorchVersion(torch.__version__) >= "2.13"


def held_compiling(function: _Function) -> _Function:
    """Have ``torch.compiler.is_compiling`` hold in a function that a graph calls, while AOTAutograd runs it."""
    if _HOLDS:
        return function

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not is_tracer_running():
            return function(*args)
        old, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
        try:
            return function(*args)
        finally:
            torch.compiler._is_compiling_flag = old

    return run  # type: ignore[return-value]


_CACHEABLE = entry(
    "torch._inductor.config.unsafe_marked_cacheable_functions",
    follows="torch/_functorch/_aot_autograd/autograd_cache.py, check_node_safe",
    without="a second process traces and compiles graphs of narrowcast anew",
    falls_back=True,
)


def mark_cacheable(rules: str, functions: Sequence[Callable[..., Any]] = ()) -> None:
    """Put ``rules`` into the keys of the compiler's caches, and let them keep graphs that call these functions."""
    marked = _CACHEABLE.take_or({})
    marked["narrowcast"] = rules
    marked.update({f"{function.__module__}.{function.__name__}": "" for function in functions})


def may_choose_gemms() -> bool:
    """Return whether Inductor may compute a GEMM with another kernel than the library's; True if that is unknown."""
    tunes = [option.take_or(True) for option in (_MAX_AUTOTUNE, _MAX_AUTOTUNE_GEMM)]
    return any(tunes)


_STATIC = "static_launch_user_defined_triton_kernels"
_TOLD = "use_static_triton_launcher"
"""An option that Inductor itself sends to its workers, with others in one dict."""
_POOL = entry(
    "torch._inductor.compile_worker.subproc_pool.SubprocPool",
    follows="torch/_inductor/async_compile.py, AsyncCompile.triton: extra_config",
    without="kernels that a worker has compiled take the host longer to launch",
    falls_back=True,
)


def start_kernels_statically() -> None:
    """Make graphs launch users' kernels as cheaply as Inductor's own.

    Only the option's default changes, and only in processes that compile narrowcast where there is a GPU.
    ``TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS=0`` and
    ``options={"static_launch_user_defined_triton_kernels": False}`` of ``torch.compile`` still win.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    options = getattr(config, "_config", {})
    option = options.get(_STATIC)
    if option is not None and hasattr(option, "default"):
        option.default = True
        _tell_workers(config)


def _tell_workers(config: Any) -> None:
    """Send the option with each kernel that a worker compiles, which has the default of its own process."""
    pool = _POOL.take_or(None)
    submit = getattr(pool, "submit", None)
    if submit is None or hasattr(submit, "__wrapped__"):
        return

    @functools.wraps(submit)
    def with_option(self: Any, job: Any, *args: Any) -> Any:
        told = {_STATIC: getattr(config, _STATIC)}
        return submit(
            self, job, *({**arg, **told} if type(arg) is dict and _TOLD in arg else arg for arg in args)
        )

    pool.submit = with_option


_FAILURE = entry(
    "torch._dynamo.exc.TorchDynamoException",
    follows="torch/_dynamo/exc.py",
    without="train --compile shows a failure of the compiler with its traceback",
    falls_back=True,
)


def is_failure_of_compiler(error: Exception) -> bool:
    """Return whether ``torch.compile`` raised it, of itself or of its backend."""
    return isinstance(error, _FAILURE.take_or(()))


_KEEP_ADDRESS = entry(
    "torch._dynamo.mark_static_address",
    follows="torch/_dynamo/decorators.py",
    without="a compiled graph with CUDA graphs copies the tensor in and the result out, with the same bits",
    falls_back=True,
)


def keep_address(tensor: Tensor) -> None:
    """Mark a tensor's address as fixed, so that the compiler need not check it."""
    mark = _KEEP_ADDRESS.take_or(None)
    if mark is not None:
        mark(tensor, guard=False)


_CONFIG = entry(
    "torch._dynamo.config.patch",
    follows="torch/_dynamo/config.py; torch.compile takes recompile_limit since 2.12",
    without="install PyTorch 2.12 or newer",
)
_TAKES_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def compile_up_to(function: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """Compile a function as one graph, again for other sizes and options up to a limit; beyond it calls raise."""
    if _TAKES_LIMIT:
        return torch.compile(function, fullgraph=True, recompile_limit=limit)  # type: ignore[call-overload]
    compiled = torch.compile(function, fullgraph=True)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with _CONFIG.take()(recompile_limit=limit):
            return compiled(*args)

    return run


_WRAPS_CALLS = entry(
    "torch._dynamo.eval_frame.OptimizedModule._should_wrap_module_call_impl",
    follows="torch/_dynamo/eval_frame.py, since 2.14",
    without="a compiled container of torch.nn that is sharded raises Dynamo's own error",
    falls_back=True,
    tried="2.14-",
)
_COMPILED_CALL = entry(
    "module._compiled_call_impl",
    follows="torch/nn/modules/module.py",
    without="a compiled container of torch.nn that is sharded raises Dynamo's own error",
    falls_back=True,
)


def traces_own_hooks(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called and made a graph that its own hooks would be part of.

    PyTorch 2.14 and newer do so where the forward is one of ``torch.nn``, as that of ``nn.Sequential``.
    """
    if getattr(module, "_compiled_call_impl", None) is None:
        return False
    return bool(_WRAPS_CALLS.take_or(lambda call: False)(getattr(module, "_call_impl", None)))
