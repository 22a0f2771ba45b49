"""Measures loaders of checkpoints on this machine: ``python -m bench --help``."""
