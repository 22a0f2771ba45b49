"""Reading of stored elements, decoded where they are encoded; sources around other sources."""
