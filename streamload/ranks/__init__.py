"""Several processes that load one model together: all of them, or none."""
