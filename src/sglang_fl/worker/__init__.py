"""The scheduler processes: their model runner, and metrics."""
