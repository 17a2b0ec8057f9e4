"""Dropout whose masks belong to units."""
