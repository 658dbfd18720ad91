"""Tables of markdown and their cells."""

import pytest

from eagle_jax.markdown import markdown, short


def test_columns_are_padded_and_numbers_stand_to_the_right() -> None:
    text = markdown(["method", "tau"], [["a|b", "1.25"], ["c", "10.00"]])
    assert text.splitlines() == [
        "| method |   tau |",
        "| ------ | ----: |",
        "| a\\|b   |  1.25 |",
        "| c      | 10.00 |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (0, "0"), (0.1234, "0.123"), (1.239, "1.24")),
        *((12.34, "12.3"), (1234.5, "1,234")),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert short(value) == text
