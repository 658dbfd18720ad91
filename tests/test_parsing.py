import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.errors import InputError, one_line
from eagle_jax.parsing import MAX_BYTES, parse_json, read_json, read_toml, resolved
from tests.helpers import refused


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[" * 100_000, "nested"),
        ('{"a": ' * 200 + "1" + "}" * 200, "nested more than 100"),
        ("[" * 101 + "]" * 101, "nested more than 100"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "1e999"),
        ('{"a": 1' + "0" * 64 + "}", "64 digits"),
        (b'{"a": "\xff"}', "UTF-8"),
        ("{", "not valid JSON"),
    ],
)
def test_json_beyond_bounds_is_refused(text: str | bytes, named: str) -> None:
    refused(lambda: parse_json(text, "config.json"), "config.json", named)


@pytest.mark.parametrize(
    "text",
    ["[" * 100 + "]" * 100, '{"a": 1' + "0" * 63 + "}", '{"a": -1e308}', '"\\u202e"'],
)
def test_json_at_its_bounds_is_read(text: str) -> None:
    assert parse_json(text, "x") is not None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a = nan", "nan"),
        ("a = 1" + "0" * 64, "64 digits"),
        ("a = " + "[" * 5000, "nested"),
        ("a = " + "{b=" * 150 + "1" + "}" * 150, "nested"),
        ("a =", "not valid TOML"),
        ("a = '\udcff'", "UTF-8"),
    ],
)
def test_toml_beyond_bounds_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    refused(lambda: read_toml(path), "settings.toml", named)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name, text, read in (
        ("a.json", '{"a": 1}', read_json),
        ("a.toml", "a = 1", read_toml),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert read(tmp_path / name) == {"a": 1}


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        refused(lambda path=path: read_json(path), str(path), "no file")
    refused(lambda: read_json(tmp_path / "missing"), "missing", "No such file")
    (tmp_path / "list.json").write_text("[1]")
    refused(lambda: read_json(tmp_path / "list.json"), "list.json holds no JSON object")


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "there").symlink_to("back")
    (tmp_path / "back").symlink_to("there")
    for path in (tmp_path / "there", tmp_path / "there" / "file"):
        refused(lambda path=path: resolved(path), f"{path} is a link that leads to its")
    (tmp_path / "open").symlink_to("nowhere")
    assert resolved(tmp_path / "open") == tmp_path / "nowhere"


def test_a_file_too_large_for_settings_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # Sparse: nothing is on disk.
    refused(lambda: read_json(tmp_path / "config.json"), "67,108,865 bytes")


@given(st.text())
def test_refusals_are_one_line_that_a_terminal_may_show(said: str) -> None:
    message = str(InputError(f"a name: {said}"))
    assert message.isprintable()
    assert message.isascii() or not said.isascii()


def test_long_refusals_keep_what_is_wrong_and_what_to_do() -> None:
    shown = one_line("wrong: " + "x" * 5000 + "; do this")
    assert shown.startswith("wrong: x") and shown.endswith("x; do this")
    assert len(shown) <= 290
    assert len(one_line("\u202e" * 5000)) <= 290
    assert one_line("a\nb\x1b[2J\u202e\ud800é") == "a\\nb\\x1b[2J\\u202e\\ud800é"
