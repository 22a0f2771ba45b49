"""From a path to a filled module: the one way every entry point takes."""
