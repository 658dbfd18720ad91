"""What is done with the tokenizer of a checkpoint, and what never."""

import json
import shutil
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import load_pair
from eagle_jax.generation.tokenizer import apply_chat_template, load_tokenizer
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
    refused(lambda: load_tokenizer(target, 300), "holds no usable tokenizer")


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


def test_a_template_reaches_nothing_but_what_it_is_given(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    refused(
        lambda: apply_chat_template(tokenizer, TURNS, add_generation_prompt=True),
        "refuses the conversation",
        "unsafe",
    )
