"""Choose: what may run, in what order, and why. Pure functions of implementations and policy."""
