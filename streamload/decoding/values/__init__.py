"""The decoders: rows of stored bytes to rows of values, by torch."""
