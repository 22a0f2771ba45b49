"""Reference models in plain torch; they know nothing of checkpoints."""
