"""What users have instead of the kernels here: plain PyTorch to compile, and the kernels of other packages."""
