"""Calls of ops: how an op is defined, and run in functions that are traced or not."""
