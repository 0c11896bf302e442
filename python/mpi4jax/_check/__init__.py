"""Warnings and comparisons that find mistakes in programs."""
