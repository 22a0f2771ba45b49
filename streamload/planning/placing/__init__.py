"""From an assignment of names to planned tensors: shapes, dtypes, strides, copies; or why not."""
