"""vLLM's platform: its classes, its start, its changes to the configuration, and its refusals."""
