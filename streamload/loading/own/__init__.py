"""What a module's own code makes of a load: names, tensors that it provides for, extra states."""
