"""What is done with the tokenizer of a checkpoint, and what never."""

import json
import shutil
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import load_pair
from eagle_jax.engine.wording import apply_chat_template, encode, load_tokenizer
from tests.checkpoints.folders import change_config
from tests.helpers import refused


@pytest.fixture
def target(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target to change at will."""
    return Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))


def test_code_of_a_checkpoint_is_not_run_even_after_a_yes(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = target / "ran"
    (target / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    settings = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own"] * 2},
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "tokenizer.json").rename(target / "vocab.own")
    answers = StringIO("y\ny\ny\n")
    monkeypatch.setattr(sys, "stdin", answers)
    refused(lambda: load_tokenizer(target, 300), "no usable tokenizer", "custom code")
    assert not ran.exists()
    assert answers.tell() == 0, "nobody was asked"


def test_a_sentencepiece_file_alone_gives_the_same_ids(
    shared: Path, tmp_path: Path
) -> None:
    known = shared / "models" / "stories260K"
    for path in known.iterdir():
        if path.name != "tokenizer.json":
            shutil.copyfile(path, tmp_path / path.name)
    fast, slow = load_tokenizer(known, 512), load_tokenizer(tmp_path, 512)
    openings = json.loads((shared / "data" / "story_openings.json").read_text())
    for text in [*openings, "", "  é\n\t日本 <s> x</s>", "a" * 100]:
        assert slow(text).input_ids == fast(text).input_ids
        ids = fast(text).input_ids
        assert slow.decode(ids) == fast.decode(ids)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"model": {"type": "other"}}', "{" * 9999]
)
def test_a_broken_tokenizer_is_refused(target: Path, content: str) -> None:
    (target / "tokenizer.json").write_text(content)
    refused(lambda: load_tokenizer(target, 300), "no usable tokenizer")


def test_a_target_without_a_tokenizer_is_refused(target: Path) -> None:
    (target / "tokenizer.json").unlink()
    settings = target / "tokenizer_config.json"
    settings.write_text('{"tokenizer_class": "LlamaTokenizer"}')
    refused(lambda: load_tokenizer(target, 300), "there is no vocabulary")
    settings.unlink()
    remedy = "instantiate and convert; copy the tokenizer's files there"
    refused(lambda: load_tokenizer(target, 300), "holds no usable", remedy)


@pytest.mark.parametrize(
    ("file", "fields", "named"),
    [
        ("tokenizer_config", {"model_max_length": "512"}, "model_max_length = '512'"),
        ("tokenizer_config", {"max_len": [512]}, "model_max_length = [512] must be a"),
        ("special_tokens_map", {"unk_token": {}}, "recursion"),
    ],
)
def test_settings_that_the_first_prompt_would_trip_over_are_refused(
    target: Path, file: str, fields: dict[str, Any], named: str
) -> None:
    path = target / f"{file}.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    stored.pop("model_max_length", None)
    path.write_text(json.dumps(stored | fields))
    refused(lambda: load_tokenizer(target, 300), "no usable tokenizer", named)


def test_an_end_token_that_ends_no_text_is_warned_about_once(target: Path) -> None:
    change_config(target, eos_token_id=7)
    pair = load_pair(str(target), method="lookup", is_lazy=True)
    with pytest.warns(UserWarning, match=r"'</s>'.* ends no text: .* \[7\].* to 299"):
        assert pair.tokenizer.eos_token_id == 299
    again = load_pair(str(target), method="lookup", is_lazy=True)
    assert again.tokenizer is not pair.tokenizer  # A warning would be an error here.
    (target / "generation_config.json").write_text('{"eos_token_id": [299, 8]}')
    assert load_pair(str(target), method="lookup", is_lazy=True).tokenizer


def test_a_panic_of_the_tokenizers_own_code_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it."""

    from transformers import PreTrainedTokenizerFast

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", panic)
    refused(lambda: load_tokenizer(target, 300), "index out of bounds")


def test_ids_beyond_the_embedding_are_refused_and_added_ones_in_prompts_alone(
    target: Path,
) -> None:
    def generated(prompt: str) -> object:
        pair = load_pair(str(target), method="lookup")
        return pair.generate(prompt, max_new_tokens=4)

    path = target / "tokenizer.json"
    before, plain = path.read_text(), generated("the heart")
    content = json.loads(before)
    content["model"]["vocab"]["h"] = 300
    path.write_text(json.dumps(content))
    refused(lambda: load_tokenizer(target, 300), "ids up to 300", "300 rows")
    content = json.loads(before)
    added = {"id": 300, "content": "<pad>", "special": True, "normalized": False}
    others = {"single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append(added | others)
    path.write_text(json.dumps(content))
    assert generated("the heart") == plain
    refused(lambda: generated("the <pad>"), "has the id 300", "0 to 299")


TURNS = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tokenizer(chat_pair: Path) -> Any:
    return load_tokenizer(chat_pair / "target", 300)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m | tojson }}\n"
        "{% endfor %}{% if add_generation_prompt %}{{ eos_token }}{% endif %}",
        "{% for m in messages %} {% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}",
        "{{ strftime_now('%d %b %Y') }}",
    ],
)
def test_a_conversation_is_rendered_as_by_transformers(
    tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    turns = [*TURNS, {"role": "é\u2028\ud800", "content": "\n<s>", "name": None}]
    for asks in (False, True):
        text, blocks = apply_chat_template(tokenizer, turns, add_generation_prompt=asks)
        assert text == tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=asks
        )
        assert (blocks is None) == ("generation %}" not in template)
        marked = [text[start:end] for start, end in blocks or []]
        assert not marked or marked == [turn["content"] for turn in turns]


_SPEAKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_NAMED = {
    "default": f"plain {_SPEAKS}{_TOOLS}",
    "tool_use": f"with tools {_TOOLS}{_SPEAKS}",
    "rag": f"{_SPEAKS}{{% for d in documents %}}{{{{ d.title }}}}{{% endfor %}}",
}


def weather(place: str, days: int = 1) -> str:
    """Says what the weather will be.

    Args:
        place: Where.
        days: How many days from now.
    """
    return f"{place} {days}"


_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("template", [_SPEAKS + _TOOLS, _NAMED])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"tools": [_SCHEMA]},
        {"tools": [weather, _SCHEMA], "mood": "calm"},
        {"tools": []},
        {"tools": None},
        {"chat_template": "default", "tools": [_SCHEMA]},
        {"chat_template": "rag", "documents": [{"title": "T", "text": "x"}]},
        {"chat_template": "{{ messages[0].content }}{{ bos_token }}", "bos_token": 7},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"max_length": 3, "padding": True},
    ],
)
def test_all_arguments_of_a_conversation_are_those_of_transformers(
    tokenizer: Any, template: Any, variables: dict[str, Any]
) -> None:
    tokenizer.chat_template = template
    if variables.get("chat_template", "{") in _NAMED and template is not _NAMED:
        named = (
            f"chat_template = '{variables['chat_template']}'",
            "one without a name",
        )
        refused(lambda: encode(tokenizer, TURNS, variables), *named)
        return
    wanted = tokenizer.apply_chat_template(
        TURNS, tokenize=False, **{"add_generation_prompt": True} | variables
    )
    ids = tokenizer(wanted, add_special_tokens=False).input_ids
    assert encode(tokenizer, TURNS, variables) == ids


def test_templates_that_are_not_there_are_refused_by_name(tokenizer: Any) -> None:
    tokenizer.chat_template = {"tool_use": _TOOLS, "rag": _SPEAKS}
    refused(
        lambda: encode(tokenizer, TURNS, {"chat_template": "rga"}),
        "chat_template = 'rga'",
        "rag, tool_use",
    )
    refused(lambda: encode(tokenizer, TURNS), "no default", "rag")
    refused(lambda: encode(tokenizer, TURNS, {"tools": [3]}), "Tools should either be")
    for name in (3, ["rag"], {"rag": "{{ 1 }}"}):
        given: dict[str, Any] = {"chat_template": name}
        refused(lambda given=given: encode(tokenizer, TURNS, given), f"{name!r}")
    given = {"messages": 1, "chat_template": "rag"}
    refused(lambda: encode(tokenizer, TURNS, given), "'messages'")
    tokenizer.chat_template = None
    given = {"chat_template": "{{ messages[0].content }}"}
    assert encode(tokenizer, TURNS, given) == encode(tokenizer, "Hi")[1:]


def test_a_template_reaches_nothing_but_what_it_is_given(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    refused(
        lambda: apply_chat_template(tokenizer, TURNS, add_generation_prompt=True),
        "refuses the conversation",
        "unsafe",
    )
