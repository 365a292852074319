"""`python -m minigpt` and `torchrun -m minigpt`: the same program as `minigpt`."""

from minigpt.cli.app import main

main()
