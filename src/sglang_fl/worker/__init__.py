"""The scheduler processes: their model runner, communicator, reports and metrics."""
