"""Code that both hosts' plugins share and that imports neither host."""
