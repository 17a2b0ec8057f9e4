"""Trimtab inside the frameworks people already use."""
