"""Grids as they are written."""

import pytest

from eagle_jax.tuning.trees import parse_grid
from tests.helpers import refused


@pytest.mark.parametrize("text", ["", "8/7", "8-7-1", "8/7/1,9/8/1", "1/3/2", "8/0/2"])
def test_grids_that_draft_nothing_are_refused(text: str) -> None:
    refused(lambda: parse_grid(text), "num_nodes" if text else "")
    refused(lambda: parse_grid(f"60/6/{'9' * 5000}"), "must be num_nodes/depth")
