"""What a checkpoint says of its requests: `generation_config.json`, chat templates."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import load_pair
from eagle_jax.engine.request import Request
from tests.helpers import refused, settings_of


@pytest.fixture(scope="module")
def chat_folder(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults") / "target"
    shutil.copytree(tiny_pair / "target", folder)
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{{ mood }}"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"chat_template": template})
    )
    return folder


def defaults_of(folder: Path, record: Mapping[str, Any], **more: Any) -> Request:
    (folder / "generation_config.json").write_text(json.dumps(record))
    config = settings_of(None, method="lookup")
    return load_pair(str(folder), None, config, is_lazy=True, **more).request(top_k=7)


def test_a_checkpoint_says_how_its_requests_draw(chat_folder: Path) -> None:
    record = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    record |= {"repetition_penalty": 1.05, "eos_token_id": 299, "pad_token_id": 0}
    with pytest.warns(
        UserWarning, match="asks for temperature 0.7, top_p 0.8, top_k 20"
    ):
        found = defaults_of(chat_folder, record)
    wanted = Request(temperature=0.7, top_p=0.8, top_k=7, repetition_penalty=1.05)
    assert found == wanted
    assert defaults_of(chat_folder, record, generation_config="none") == Request(
        top_k=7
    )
    # Without `do_sample` transformers draws nothing either.
    assert defaults_of(
        chat_folder, record | {"do_sample": False}, generation_config="none"
    )
    with pytest.warns(UserWarning, match="repetition_penalty 1.05"):
        found = defaults_of(chat_folder, record | {"do_sample": False})
    assert found == Request(repetition_penalty=1.05, top_k=7)


_ASKS = "ignore:.*asks for"


@pytest.mark.filterwarnings(_ASKS)
def test_zeros_of_a_checkpoint_are_values(chat_folder: Path) -> None:
    draws = {"do_sample": True}
    assert defaults_of(chat_folder, draws).temperature == 1.0
    assert defaults_of(chat_folder, draws | {"temperature": None}).temperature == 1.0
    record = draws | {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0}
    assert defaults_of(chat_folder, record) == Request(top_k=7)


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"do_sample": True, "temperature": -1.0}, "temperature = -1.0"),
        ({"do_sample": True, "top_p": 0.0}, "top_p = 0.0 must be above 0"),
        ({"do_sample": "false"}, "do_sample = 'false' must be true or false"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"max_new_tokens": 8, "min_new_tokens": "4"}, "min_new_tokens"),
        ({"bad_words_ids": [5]}, "bad_words"),
        ({"bad_words_ids": [[300]]}, "bad_words has the id 300"),
        (
            {"suppress_tokens": 5},
            "suppress_tokens, sequence_bias and stop_strings must",
        ),
        ({"sequence_bias": {"[5]": 1.0}}, "must be lists"),
        ({"stop_strings": 5}, "must be lists"),
        ({"sequence_bias": [[[5], "x"]]}, "logit_bias"),
        ({"stop_strings": [3]}, "stop holds 3"),
    ],
)
def test_values_of_a_checkpoint_that_mean_nothing_are_refused(
    chat_folder: Path, record: dict[str, Any], named: str
) -> None:
    path = str(chat_folder / "generation_config.json")
    refused(lambda: defaults_of(chat_folder, record), path, named)
    assert defaults_of(chat_folder, record, generation_config="none")


def test_a_checkpoint_says_what_never_comes_and_how_long_texts_are(
    chat_folder: Path,
) -> None:
    record = {
        "eos_token_id": 299,
        # A stop token alone may be suppressed, but is no bad word, as in transformers.
        "bad_words_ids": [[5, 6], [299], [7]],
        "suppress_tokens": [8, 299, 300, -1],
        "sequence_bias": [[[40], -2.5], [[41], 3.0]],
        "max_new_tokens": 9,
        "min_new_tokens": 4,
        "stop_strings": ["\n\n"],
    }
    with pytest.warns(UserWarning, match=r"asks for .*max_new_tokens 9"):
        found = defaults_of(chat_folder, record)
    assert found == Request(
        top_k=7,
        bad_words_ids=[[5, 6], [7], [8], [299]],
        logit_bias={40: -2.5, 41: 3.0},
        max_new_tokens=9,
        min_new_tokens=4,
        stop=["\n\n"],
    )
    banned = ((5, 6), (7,), (8,), (299,))
    assert found.processors(None).bad_words == banned


@pytest.mark.torch
@pytest.mark.filterwarnings(_ASKS)
def test_texts_are_those_of_transformers_with_the_same_file(chat_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain = {"eos_token_id": 299, "max_new_tokens": 12}
    found: list[list[int]] = []
    for more in (
        {},
        {"suppress_tokens": "first", "repetition_penalty": 1.3},
        {"bad_words_ids": "pairs", "no_repeat_ngram_size": 2},
        {"sequence_bias": "away", "max_new_tokens": 7},
        {"min_new_tokens": 5, "sequence_bias": "end"},
    ):
        first = found[0] if found else []
        values = {
            "first": first[:3],
            "pairs": [first[2:4], first[:1]],
            "away": [[[id_], -9.0] for id_ in dict.fromkeys(first)],
            "end": [[[299], 90.0]],
        }
        record = plain | {name: values.get(str(x), x) for name, x in more.items()}
        (chat_folder / "generation_config.json").write_text(json.dumps(record))
        pair = load_pair(str(chat_folder), method="lookup")
        (one,) = pair.generate("the heart")
        model: Any = AutoModelForCausalLM
        judge = model.from_pretrained(chat_folder, dtype="float32")
        ids = torch.tensor([one.prompt_ids])
        wanted = judge.generate(ids, attention_mask=torch.ones_like(ids))
        assert one.token_ids == wanted[0, ids.shape[1] :].tolist(), record
        found.append(one.token_ids)
    assert len({tuple(ids) for ids in found}) == len(found)
    assert [len(ids) for ids in found] == [12, 12, 12, 7, 6]


@pytest.mark.filterwarnings(_ASKS)
def test_a_checkpoints_least_length_gives_way_to_a_requests_limit(
    chat_folder: Path,
) -> None:
    record = {"min_new_tokens": 200}
    (chat_folder / "generation_config.json").write_text(json.dumps(record))
    pair = load_pair(str(chat_folder), method="lookup", is_lazy=True)
    assert pair.request(max_new_tokens=300).min_new_tokens == 200
    assert pair.request(max_new_tokens=3).min_new_tokens == 3
    assert pair.request().min_new_tokens == pair.request().max_new_tokens
    refused(lambda: pair.request(min_new_tokens=200), "min_new_tokens = 200 must be")


@pytest.mark.filterwarnings(_ASKS)
def test_what_a_checkpoint_asks_for_in_vain_is_told_once(chat_folder: Path) -> None:
    record = {
        **{"num_beams": 4, "guidance_scale": 1.5, "forced_eos_token_id": 299},
        **{"penalty_alpha": 0.6, "exponential_decay_length_penalty": [9, 1.1]},
        # These change nothing, the last without draws.
        **{"num_beam_groups": 1, "max_length": 4096, "use_cache": True},
        **{"length_penalty": 1.0, "token_healing": False, "dola_layers": None},
        **{"begin_suppress_tokens": [], "chat_format": "chatml", "typical_p": 0.9},
    }
    with pytest.warns(UserWarning, match="not followed here") as told:
        found = defaults_of(chat_folder, record)
    assert found == Request(top_k=7)
    (one,) = (str(x.message) for x in told)
    assert "num_beams = 4" in one and "penalty_alpha = 0.6" in one
    for name in ("groups", "typical_p", "max_length", "healing", "chat_format"):
        assert name not in one
    assert defaults_of(chat_folder, record) == found  # A warning would be an error.
    record = {"do_sample": True, "typical_p": 0.9, "sequence_bias": [[[5, 6], 1.0]]}
    with pytest.warns(UserWarning, match="typical_p = 0.9, sequence_bias = "):
        assert defaults_of(chat_folder, record).temperature == 1.0


def test_conversations_have_a_system_and_variables_and_prompts_are_cut(
    chat_folder: Path,
) -> None:
    pair = load_pair(
        str(chat_folder),
        None,
        settings_of(None, method="lookup"),
        is_lazy=True,
        generation_config="none",
    )
    ids = pair.encode("Hi", chat=True, system="Be.", chat_template_kwargs={"mood": 3})
    written = pair.tokenizer("systemBe.userHi3", add_special_tokens=False).input_ids
    assert ids == written
    assert pair.encode("Hello", truncate_prompt_tokens=2) == pair.encode("Hello")[-2:]
    refused(
        lambda: pair.encode("Hi", system="Be."), "`system`", "belong to conversations"
    )
    refused(lambda: pair.encode("Hi", truncate_prompt_tokens=0), "at least 1")
