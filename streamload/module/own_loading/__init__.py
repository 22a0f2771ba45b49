"""Modules that take part in their own loading, followed without values."""
