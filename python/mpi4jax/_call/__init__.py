"""Calls of operations: their definition, and running them in traced functions or eagerly."""
