"""Parts that belong together: tensors in pieces, and the files that hold them."""
