"""Measuring loads: the floor of a machine, the page cache, a process watched from outside."""
