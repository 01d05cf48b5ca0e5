"""Where a row comes from: the device, the versions, the commit."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import torch

import narrowcast as nc
from narrowcast_tools.train.machine import cpu_model

Row = dict[str, object]


def machine(device: str, commit: str) -> Row:
    """Columns that say where a row comes from."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{cpu_model()}, threads: {torch.get_num_threads()}"
    )
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "narrowcast": nc.__version__,
        "commit": commit,
    }


def commit() -> str:
    """The checkout's commit as git names it, "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git on this machine
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
