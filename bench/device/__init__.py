"""``python -m bench device``: what the device lane does on a real device, in ten minutes."""
