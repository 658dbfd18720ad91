"""EAGLE-3 heads, and those of EAGLE-3.1 and of speculators."""
