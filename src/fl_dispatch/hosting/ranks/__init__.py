"""Ranks of one engine: their collectives, FlagCX, small sums in one kernel, and a check of equal choices."""
