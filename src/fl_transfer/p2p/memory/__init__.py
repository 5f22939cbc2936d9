"""Memory for caches that wait, moments on a device at which it is ready, and a KV cache's blocks as bytes."""
