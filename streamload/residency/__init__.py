"""A mapped model larger than memory: blocks that stay, others that are read as they are used."""
