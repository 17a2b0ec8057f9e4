"""`trimtab bench hybrid`."""
