"""Parts that both hosts' plugins need and neither host knows."""
