"""Adaptive bits: statistics of the gradients, and switching bits on all ranks at once."""
