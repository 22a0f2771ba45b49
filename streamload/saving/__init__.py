"""Writing checkpoints: export, convert, whole files or none."""
