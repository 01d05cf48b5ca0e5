"""The first import of PyTorch, without its warning where NumPy is missing: nothing here needs NumPy."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch  # noqa: F401
