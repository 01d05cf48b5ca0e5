"""Many ranks: experts on other ranks than their tokens."""

from .moe_dispatch import MoEDispatch

__all__ = ["MoEDispatch"]
