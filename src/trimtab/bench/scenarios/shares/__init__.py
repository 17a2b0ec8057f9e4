"""`trimtab bench shares`."""
