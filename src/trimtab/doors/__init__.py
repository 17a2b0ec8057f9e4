"""Where trimtab enters other people's training: DDP's hook, FSDP2's collectives, a backend."""
