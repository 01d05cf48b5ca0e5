"""AOTAutograd: whether compiled code is running."""

from __future__ import annotations

import os
import sys
from typing import Any

from .private import entry, private

_FRAMES = entry(
    "frames of torch/_functorch/_aot_autograd",
    follows="torch/_functorch/_aot_autograd/runtime_wrappers.py",
    without="call the model without receipt.recording()",
)
_PACKAGE: Any = private(
    "torch._functorch._aot_autograd.__path__",
    follows="torch/_functorch/_aot_autograd/runtime_wrappers.py",
    without="call the model without receipt.recording()",
    fallback=(),
)
_FOLDERS = tuple(os.path.join(folder, "") for folder in _PACKAGE)


def runs_compiled() -> bool:
    """Return whether a compiled graph is what runs: one of the callers is the wrapper that AOTAutograd puts around it.

    Raises:
        UpstreamError: this release keeps these wrappers elsewhere.
    """
    if not _FOLDERS:
        raise _FRAMES.error()
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_FOLDERS):
            return True
        frame = frame.f_back
    return False
