"""Hydra's heads, with and without the prefix layer of Hydra++."""
