"""8-bit operands and products on a GPU."""
