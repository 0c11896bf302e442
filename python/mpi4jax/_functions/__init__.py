"""Functions that are made of ops, and those that start ops."""
