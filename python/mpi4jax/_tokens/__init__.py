"""Tokens, which programs for older packages pass from op to op, and functions without them."""
