"""Checkpoints on web servers, in buckets and on the hub, read in ranges without a local copy."""
