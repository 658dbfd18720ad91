"""Decoding loops; they meet models and drafters through `eagle_jax.interface` only."""
