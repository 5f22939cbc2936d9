"""The worker processes: one device, one model and the dispatch core each; their ranks, memory and warm-up."""
