"""Calls of FlagGems, and what its kernels ask of their arguments."""
