"""What acts while training runs: adaptive bits, batch shares, following a plan, balancing."""
