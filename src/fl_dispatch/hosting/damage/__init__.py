"""Requests damaged by NaN, infinity or a wrong implementation: these alone end or start over."""
