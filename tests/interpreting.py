"""Triton's interpreter, in which kernels run on CPU tensors, without what it looks up again and again."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and not torch.cuda.is_available()


@contextmanager
def fast_interpreter(interprets: bool = INTERPRETING) -> Iterator[None]:
    """Keep what takes two fifths of the interpreter's time, and let loops run to a size that is an argument.

    At every call of a device function it searches ``triton.language`` for built-ins and replaces them, although the
    launch has replaced them. For every value it makes a table of dtypes. Triton 3.6 also makes an int of an array
    of one element, which NumPy 2.4 refuses.
    """
    if not interprets:
        yield
        return
    from triton import language
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch_lang, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    replaced: set[Any] = set()  # the languages of the launch that runs

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value in (language, language.core)]

    def replace_once(function: Any) -> Any:
        if replaced.issuperset(languages(function)):
            return interpreter._LangPatchScope()
        replaced.update(languages(function))
        return patch_lang(function)

    @functools.cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def getmembers(package: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(package, name)) for name in names_of_builtins(package)]

    patch_tensor = interpreter._patch_lang_tensor

    def with_sizes(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    np_dtype_of_scalars = functools.cache(np_dtype)

    def fast_np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        return (
            np_dtype(element) if isinstance(element, language.pointer_type) else np_dtype_of_scalars(element)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "inspect", SimpleNamespace(**{**vars(inspect), "getmembers": getmembers}))
        patch.setattr(interpreter, "_LangPatchScope", Scope)
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter, "_patch_lang_tensor", with_sizes)
        patch.setattr(interpreter, "_get_np_dtype", fast_np_dtype)
        yield
