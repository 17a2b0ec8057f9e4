"""Time, memory and damage of a plan, before it runs."""
