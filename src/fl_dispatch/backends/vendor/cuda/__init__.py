"""NVIDIA GPUs, with the compiled operators and FlashAttention 3 of vLLM's CUDA build."""
