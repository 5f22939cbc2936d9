"""The scheduler processes: their model runner, several steps for one scheduling, damage, and metrics."""
