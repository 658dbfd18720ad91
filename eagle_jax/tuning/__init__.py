"""Which tree pays: measured costs and replayed acceptance."""
