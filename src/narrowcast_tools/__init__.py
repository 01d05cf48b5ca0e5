"""The command line ``narrowcast``, its trainer, planner and bench; they use the library."""

import logging

# It warns, when a CPU compiles, that a CUDA toolkit without a GPU is there.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
