"""EAGLE-1/2 heads, which are the same: EAGLE-2 draws other trees with them."""
