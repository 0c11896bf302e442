"""What an op is: its row, its primitive, its arguments, communicators, reductions, pytrees."""
