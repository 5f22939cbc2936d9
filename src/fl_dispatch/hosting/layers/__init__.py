"""Layers of a host that run our operators: their classes, their binding, and a survey of a loaded model."""
