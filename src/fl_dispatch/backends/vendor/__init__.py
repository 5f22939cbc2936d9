"""Backends of chip vendors, one package each; every package with a ``register_ops`` module is registered."""
