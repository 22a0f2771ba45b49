"""Turns rows of stored bytes into rows of values: descriptions, and a decoder for each kind."""
