"""CPUs, with the compiled kernels of vLLM's CPU build, PyTorch's oneDNN products, and C++ of this project."""
