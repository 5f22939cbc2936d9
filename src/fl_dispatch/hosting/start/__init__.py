"""The start of a host's process: its plugin, the hand-over to children, first choices and batches to warm up."""
