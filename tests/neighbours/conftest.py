"""torchvision's wheel on the package index is for CUDA: beside a PyTorch without it, its operators are not loaded.

No test runs them. Importing torchvision needs two of their schemas.
"""

from __future__ import annotations

from importlib import metadata

import torch

if torch.version.cuda is None and "+cpu" not in metadata.version("torchvision"):
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
