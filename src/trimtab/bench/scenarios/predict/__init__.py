"""`trimtab bench predict`."""
