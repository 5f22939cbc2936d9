"""SGLang's layers over our operators: which classes, their products, adapters and rotations."""
