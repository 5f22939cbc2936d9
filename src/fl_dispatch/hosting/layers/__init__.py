"""Layers of a host that run our operators: activations, binding, and a survey of a loaded model."""
