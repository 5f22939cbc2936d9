"""Ranks of one engine: SGLang's collectives over ours, their agreement, and data-parallel attention."""
