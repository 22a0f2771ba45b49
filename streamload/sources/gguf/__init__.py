"""GGUF: header, metadata and names of a file, and the source that reads it."""
