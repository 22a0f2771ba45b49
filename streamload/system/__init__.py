"""The machine: memory, control groups, pages, threads, the garbage collector."""
