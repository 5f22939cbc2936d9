"""NVIDIA GPUs, with the compiled operators and the FlashAttention 3 of vLLM's CUDA build."""
