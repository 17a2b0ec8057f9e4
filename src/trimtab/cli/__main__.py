"""`python -m trimtab.cli`, for `torchrun -m`."""

from trimtab.cli import main

main()
