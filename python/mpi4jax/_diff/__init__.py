"""Derivatives of ops, and of programs that contain them."""
