"""`trimtab bench adaptive`."""
