"""Cartesian grids: axes, ghost cells and neighbors of the blocks of an array."""
