"""`python -m layerwise`, for torchrun."""

from layerwise.cli import main

main()
