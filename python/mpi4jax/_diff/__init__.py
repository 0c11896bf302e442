"""Derivatives of operations, and of programs that contain them."""
