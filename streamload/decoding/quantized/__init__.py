"""Which stored tensors are quantised, by config.json and by names: a module for each method."""
