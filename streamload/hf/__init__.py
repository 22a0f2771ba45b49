"""Models of the transformers library: its classes built, its names and conversions as bindings."""
