"""Run a call: its table, the functions in the table, and the recovery after an exception."""
