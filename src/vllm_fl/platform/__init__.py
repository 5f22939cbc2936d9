"""vLLM's platform: its classes, its start, the configuration that it changes, and what it refuses."""
