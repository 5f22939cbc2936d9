"""Memory of a worker: the layout of its caches, glibc's heap, and pinning."""
