"""Requests with NaN, infinity, or keys and values of a wrong implementation: they end or begin again, and no other."""
