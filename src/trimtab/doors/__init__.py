"""Integrations with torch.distributed: DDP's hook, FSDP2's collectives, and the backend "trimtab"."""
