"""Tables of markdown and their cells."""

from eagle_jax.reporting import markdown


def test_columns_are_padded_and_numbers_stand_to_the_right() -> None:
    text = markdown(["method", "tau"], [["a|b", "1.25"], ["c", "10.00"]])
    assert text.splitlines() == [
        "| method |   tau |",
        "| ------ | ----: |",
        "| a\\|b   |  1.25 |",
        "| c      | 10.00 |",
    ]
