"""Balancing the ranks of a tensor-parallel job while it runs."""
