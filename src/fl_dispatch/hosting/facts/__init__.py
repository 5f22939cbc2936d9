"""Facts about a host: what a plugin relies on, and whether the host's source, which is not imported, has it."""
