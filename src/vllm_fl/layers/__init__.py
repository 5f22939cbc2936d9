"""vLLM's layers over our operators: one row per class, and one forward per family."""
