"""Two or three operators in one launch."""
