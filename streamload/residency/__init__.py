"""A mapped model larger than memory: blocks that stay, and others that are read as they are used."""
