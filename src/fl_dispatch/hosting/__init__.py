"""Parts that both hosts' plugins need and neither host knows: the hand-over to child processes, collectives, ranks,
layers, and what is reported about a worker."""
