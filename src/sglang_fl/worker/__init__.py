"""The scheduler processes: their model runner, several steps per scheduler call, damage, and metrics."""
