"""The search for the tree that pays: measured costs and replayed acceptance."""
