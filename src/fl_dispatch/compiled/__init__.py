"""Compiled code: opaque views, and choices that stay as they are."""
