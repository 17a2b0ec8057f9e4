"""What one operator, and the casts around it, take on a device."""
