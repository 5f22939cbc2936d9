"""Backends: packages of implementations."""
