"""Implementations, one file a family of operators."""
