"""Functions that are made of operations, and nonblocking operations."""
