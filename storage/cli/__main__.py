"""`python -m ckptrt.storage.cli`."""

from ckptrt.storage.cli import main

main()
