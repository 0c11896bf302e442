"""Tokens, which programs for older packages pass from operation to operation."""
