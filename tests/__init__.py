"""Trimtab's tests, importable as ``tests.*`` so that worker ranks find their functions by name."""
