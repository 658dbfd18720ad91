"""EAGLE-2 speculative decoding for JAX."""
