"""Raw GPT-NeoX partitions."""
