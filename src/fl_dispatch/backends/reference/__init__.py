"""The ground truth: every operator in plain PyTorch, on any device."""
