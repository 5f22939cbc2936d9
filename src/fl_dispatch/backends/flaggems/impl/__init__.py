"""Calls of FlagGems, and the requirements of its kernels on their arguments."""
