"""Facts about a host that a plugin relies on, checked against the host's source without importing it."""
