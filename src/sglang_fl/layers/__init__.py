"""SGLang's layers over our operators: which classes, the first forward pass, adapters and rotations."""
