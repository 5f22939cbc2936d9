"""Products with weights: plain, quantized, and of LoRA adapters."""
