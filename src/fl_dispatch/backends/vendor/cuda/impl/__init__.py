"""Calls of the compiled operators, and the operators' requirements on their arguments."""
