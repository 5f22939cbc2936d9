"""Records of workers' implementations, on disk, in reports and as metrics."""
