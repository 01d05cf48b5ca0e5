"""Processes for ``test_bench``, in a module that imports nothing large."""

from __future__ import annotations

import os
import time
from typing import Any


def crashes_then_hangs(pipe: Any, chosen: tuple[list[str], ...], device: str) -> None:
    """End with code 7, or never."""
    pipe.poll(60)
    if not chosen[0]:
        os._exit(7)
    time.sleep(60)
