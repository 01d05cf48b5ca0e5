"""Estimates of training on many GPUs: memory, bytes on the wire and time of a step, from measured rates."""

from ..hardware import GPUS, OPTIMIZERS, RECIPES, Gpu
from .estimate import Estimate, estimate, held
from .layout import Layout, plan
from .models import MODELS, Model, find_model

__all__ = [
    "GPUS",
    "MODELS",
    "OPTIMIZERS",
    "RECIPES",
    "Estimate",
    "Gpu",
    "Layout",
    "Model",
    "estimate",
    "find_model",
    "held",
    "plan",
]
