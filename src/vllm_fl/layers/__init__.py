"""vLLM's layers over our operators: one row a class, and a forward a family."""
