"""PEFT's LoRA adapters, merged into the tensors of their base model while these are read."""
