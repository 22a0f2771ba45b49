"""Runs a plan; never interprets a name."""
