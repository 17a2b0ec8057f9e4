"""`trimtab bench local`."""
