"""Choose which implementations may run, in what order, and why: pure functions of implementations and policy."""
