"""Compiled code: opaque views, and frozen choices."""
