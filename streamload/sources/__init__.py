"""Where tensors are and how their bytes are read; knows nothing of models."""
