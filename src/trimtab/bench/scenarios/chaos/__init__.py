"""`trimtab bench chaos`: real ranks, random faults, and whether what comes out is right."""
