"""The module that is loaded into: its tensors, its commit, how it is built empty."""
