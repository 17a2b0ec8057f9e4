"""`trimtab bench hybrid-accuracy`."""
