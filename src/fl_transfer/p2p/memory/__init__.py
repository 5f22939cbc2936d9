"""Memory for waiting caches, moments of a device's stream, and a KV cache's blocks as bytes."""
