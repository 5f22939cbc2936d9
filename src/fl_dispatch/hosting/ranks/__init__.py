"""Ranks of one engine: their collectives, FlagCX, small sums in one kernel, and whether all run the same."""
