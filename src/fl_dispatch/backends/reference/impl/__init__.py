"""One function an operator, one file a family."""
