"""`trimtab bench straggler`."""
