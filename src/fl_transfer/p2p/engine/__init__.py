"""An engine's exchange with others: prompts that leave, prompts that arrive, and the sockets between them."""
