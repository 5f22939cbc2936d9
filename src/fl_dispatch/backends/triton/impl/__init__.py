"""The kernels, a folder a family, each beside the function that launches it."""
