"""Names of Triton's experimental Gluon language that change from release to release, for kernels on Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .private import entry

entry(
    "triton.experimental.gluon.language.shared_memory_descriptor._reinterpret",
    follows="triton/experimental/gluon/language/_core.py; public as ``reinterpret`` since Triton 3.7",
    without="the public ``reinterpret`` is called",
    falls_back=True,
)

_PRIVATE = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Return the same shared memory with another shape and layout."""
    if _PRIVATE:
        return memory._reinterpret(dtype, shape, layout)
    else:
        return memory.reinterpret(dtype, shape, layout)
