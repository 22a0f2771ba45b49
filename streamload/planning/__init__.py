"""What a load will do, decided before a byte moves: pure, no I/O, no tensors."""
