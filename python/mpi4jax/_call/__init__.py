"""Calls of ops: how an operation is defined, and run in functions that are traced or not."""
