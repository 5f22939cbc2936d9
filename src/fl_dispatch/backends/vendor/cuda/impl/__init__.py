"""Calls of the compiled operators, and what they ask of their arguments."""
