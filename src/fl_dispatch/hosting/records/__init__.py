"""Records of what workers run, on disk, in reports and as metrics."""
