"""Chat templates that ask for today's date."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.generation.tokenizer import fix_date, load_tokenizer
from tests.helpers import refused

TURNS = [{"role": "user", "content": "Hi"}]
EVERY = "%d %b %Y|%-d %B %y|%A %a %j|%H:%M:%S|%Y-%m-%d|100%%d"


@pytest.fixture
def tokenizer(chat_pair: Path) -> Any:
    return load_tokenizer(chat_pair / "target", 300)


def _render(tokenizer: Any) -> str:
    return tokenizer.apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=True
    )


def test_a_template_takes_the_date_that_was_recorded(tokenizer: Any) -> None:
    tokenizer.chat_template = f"{{{{ strftime_now('{EVERY}') }}}}"
    assert fix_date(tokenizer, "2024-02-09") == "2024-02-09"
    assert _render(tokenizer) == (
        "09 Feb 2024|9 February 24|Friday Fri 040|00:00:00|2024-02-09|100%d"
    )


def test_the_date_of_today_is_told(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}"
    assert _render(tokenizer) == fix_date(tokenizer) == _render(tokenizer)
    assert _render(tokenizer) == datetime.date.today().isoformat()


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("\n  {% if strftime_now is defined %}\n x{% endif %}\n {{ '' }}y", "\n x y"),
        (
            "{% macro day() %}<{{ strftime_now('%d') }}>{% endmacro %}{{ day() }}",
            "<09>",
        ),
        ("{% for m in messages %}{{ strftime_now('%m') | int }}{% endfor %}", "2"),
        ("{% set now = strftime_now('%y') %}{% if true %}{{ now }}{% endif %}", "24"),
    ],
)
def test_a_template_is_otherwise_rendered_as_it_was(
    tokenizer: Any, template: str, rendered: str
) -> None:
    tokenizer.chat_template = template
    fix_date(tokenizer, "2024-02-09")
    assert _render(tokenizer) == rendered


def test_a_template_that_asks_for_no_date_is_left_alone(tokenizer: Any) -> None:
    before = tokenizer.chat_template
    assert fix_date(tokenizer, "2024-02-09") is None
    assert tokenizer.chat_template == before
    tokenizer.chat_template = None
    assert fix_date(tokenizer) is None


def test_every_template_of_a_tokenizer_takes_the_date(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": "{{ strftime_now('%Y') }}", "tool_use": "t"}
    assert fix_date(tokenizer, "2024-02-09") == "2024-02-09"
    assert _render(tokenizer) == "2024"


@pytest.mark.parametrize("date", ["yesterday", 20240209, ["2024-02-09"], ""])
def test_a_record_that_holds_no_date_is_refused(tokenizer: Any, date: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%Y') }}"
    refused(lambda: fix_date(tokenizer, date), f"{date!r} is no date such as")
