"""CPUs, with the compiled kernels of vLLM's CPU build."""
