"""Pieces that kernels of every family share."""
