"""`trimtab bench tp`."""
