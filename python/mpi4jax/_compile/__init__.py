"""What an operation is compiled to: its custom call, its place in a program, what it overwrites."""
