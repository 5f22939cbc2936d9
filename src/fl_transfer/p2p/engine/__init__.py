"""An engine's exchange with others: leaving prompts, arriving prompts, and the sockets between engines."""
