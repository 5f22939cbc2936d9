"""Products with weights: plain, quantized, of adapters."""
