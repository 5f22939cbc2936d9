"""Backends of chip vendors, one package each; all packages with a ``register_ops`` module are registered."""
