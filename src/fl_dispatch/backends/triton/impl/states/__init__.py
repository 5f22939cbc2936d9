"""Layers with a state: short convolutions, the delta rule, state spaces."""
