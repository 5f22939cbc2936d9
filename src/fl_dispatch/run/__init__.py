"""Run a call: the table that it reads, the functions in it, and what follows an exception."""
