"""The diagrams of the documentation."""

import pytest

from docs.site import diagrams


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_a_diagram_is_what_its_script_draws(name: str) -> None:
    title, height, draw = diagrams.PICTURES[name]
    drawn = diagrams.picture(title, height, draw())
    assert (diagrams.FOLDER / f"{name}.svg").read_text() == drawn
