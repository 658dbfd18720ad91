"""Models of other stacks as targets."""

from eagle_jax.adapters.cache_writing import CacheWritingTarget

__all__ = ["CacheWritingTarget"]
