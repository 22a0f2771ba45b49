"""Converted copies in the user's cache folder, mapped by later loads."""
