"""One table of names per architecture."""
