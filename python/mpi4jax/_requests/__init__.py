"""Nonblocking operations."""
