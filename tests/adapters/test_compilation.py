"""A model that writes its own cache does so in place."""

from typing import Any

import jax
import pytest

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.testing.programs import every_line, find_copies
from tests.adapters.test_cache_writing import DRAFTER, PARAMS, TARGET, requests

pytestmark = pytest.mark.usefixtures("optimised")


def test_no_round_copies_a_cache() -> None:
    decoder, asked = Decoder(target=TARGET, drafter=DRAFTER), requests(3, 4)
    state = speculative.prefill(decoder, PARAMS, asked, num_slots=192)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.target_cache.layers)]
    for program in (speculative.decode_round, speculative.decode):
        compiled: Any = program.lower(decoder, PARAMS, state).compile()
        lines = every_line(compiled.as_text())
        for shape in shapes:
            if len(shape) > 1:  # No cursor.
                assert find_copies(lines, shape) == []
