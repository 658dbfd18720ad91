"""Checks and toy models that other projects can import to check their own stack."""

from eagle_jax.testing.asserts import assert_same_tokens, assert_valid_tree
from eagle_jax.testing.drafter_contract import assert_valid_drafter
from eagle_jax.testing.target_contract import assert_valid_target
from eagle_jax.testing.toys import ToyModel, ToyTarget, path_code, path_logits

__all__ = [
    "ToyModel",
    "ToyTarget",
    "assert_same_tokens",
    "assert_valid_drafter",
    "assert_valid_target",
    "assert_valid_tree",
    "path_code",
    "path_logits",
]
