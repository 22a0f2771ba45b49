"""Continuing a prompt: token by token, and text to tokens and back."""
