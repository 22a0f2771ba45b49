"""The configuration in the files beside a checkpoint."""
