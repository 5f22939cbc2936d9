"""Mixtures of experts: routing, sorting by expert, grouped products."""
