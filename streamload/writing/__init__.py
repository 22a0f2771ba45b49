"""Writes checkpoints: file layouts, atomic replacement, and the pipeline that fills them."""
