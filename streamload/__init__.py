"""Streams large checkpoints into PyTorch models with little memory and no waiting."""
