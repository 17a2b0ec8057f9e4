"""What lowering the precision of an operator does to the gradient."""
