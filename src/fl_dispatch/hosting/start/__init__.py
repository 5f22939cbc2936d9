"""The start of a host's process: its plugin, the hand-over to children, first choices and warm-up batches."""
