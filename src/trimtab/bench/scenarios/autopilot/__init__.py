"""Unmodified scripts under torchrun, trimtab run and its autopilot."""
