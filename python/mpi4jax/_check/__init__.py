"""Warnings and comparisons: programs that do what they say, which is hardly what was meant."""
