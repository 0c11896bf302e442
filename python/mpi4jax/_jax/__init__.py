"""JAX's internals: all that the package touches of them, and nothing else does."""
