"""Routes, messages, secrets and heartbeats between engines and the proxy."""
