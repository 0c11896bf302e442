"""`jax.shard_map` over the ranks of a communicator."""
