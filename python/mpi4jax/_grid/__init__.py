"""Cartesian grids: axes, ghost cells and neighbours of the blocks of an array."""
