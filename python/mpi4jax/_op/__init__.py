"""What an operation is: its row, primitive, arguments, communicators, reductions, pytrees."""
