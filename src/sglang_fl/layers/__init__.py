"""SGLang's layers over our operators: their classes, the first forward pass, adapters and rotations."""
