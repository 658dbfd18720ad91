import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.engine import wording as cli_text
from eagle_jax.engine.wording import RefusedError, load_tokenizer
from eagle_jax.training.conversations import Example
from eagle_jax.training.encode import (
    EncodedExample,
    check_template,
    encode_chat,
    encode_examples,
)
from tests.helpers import refused

SPECIALS = ["<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>"]

LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} "
    "{% elif m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: "
    "{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
NEXT_ENDS = (  # The answer ends with the token that begins the next turn.
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content }}<|end|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
WITHOUT_PROMPT = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|eot|>{% endfor %}"
)

REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}"
    "{% endif %}" + CHATML
)
JOINS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:s{% else %}"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
THINKS = (  # As Qwen3's: what was thought is shown in the last turn alone.
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if loop.last and m.role == "
    "'assistant' %}<think>\n\n</think>{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def _marked(inside: str, after: str) -> str:
    """CHATML with a generation block around the answer and `inside`."""
    return (
        "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}"
        + inside
        + "{% endgeneration %}"
        + after
        + "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )


CHAT = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "Who is Zoë?"},
    {"role": "assistant", "content": "A poet 漢"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "She\n\nwrites"},
]


def _tokenizer(template: str | None = None, *, bos: bool = True) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ss", "\u010a\u010a"]
    merges = [("s", "s"), ("\u010a", "\u010a")]
    tokenizer = Tokenizer(
        models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", len(symbols))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        chat_template=template,
    )


def _chat(messages: list[dict[str, str]], where: str = "line 1") -> Example:
    return Example(where=where, messages=tuple(messages))


def _one(tokenizer: Any, example: Example, **settings: Any) -> EncodedExample:
    settings = {"max_length": 512} | settings
    encoded = encode_examples([example], tokenizer, **settings)
    assert len(encoded.samples) == 1
    return encoded.samples[0]


def _predicted(tokenizer: Any, sample: EncodedExample) -> list[str]:
    """The runs of tokens that are to be predicted, as text."""
    edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=False, append=False))
    return [
        tokenizer.decode(sample.tokens[start:end].tolist())
        for start, end in edges.reshape(-1, 2)
    ]


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (LLAMA3, "A poet 漢<|eot|>", "She\n\nwrites<|eot|>"),
        (CHATML, "A poet 漢<|end|>", "She\n\nwrites<|end|>"),
        (VICUNA, " A poet 漢</s>", " She\n\nwrites</s>"),
        (_marked("", "<|end|>\n"), "A poet 漢<|end|>", "She\n\nwrites<|end|>"),
        (_marked("<|end|>", "\n"), "A poet 漢<|end|>", "She\n\nwrites<|end|>"),
        (_marked("<|end|>\n", ""), "A poet 漢<|end|>", "She\n\nwrites<|end|>"),
        (NEXT_ENDS, "A poet 漢<|start|>", "She\n\nwrites"),
        # The next turn's start token is nobody's answer.
        (NEXT_ENDS.replace("<|start|>", "<s>"), "A poet 漢", "She\n\nwrites"),
        (
            WITHOUT_PROMPT,
            "<|start|>assistant A poet 漢<|eot|>",
            "<|start|>assistant She\n\nwrites<|eot|>",
        ),
    ],
)
def test_the_assistants_text_and_its_end_are_predicted_and_nothing_else(
    template: str, first: str, second: str
) -> None:
    tokenizer = _tokenizer(template)
    sample = _one(tokenizer, _chat(CHAT))
    assert _predicted(tokenizer, sample) == [first, second]
    assert sample.tokens.dtype == np.int32 and sample.loss_mask.dtype == np.bool_


@pytest.mark.parametrize(
    "template", [LLAMA3, CHATML, VICUNA, _marked("", "<|end|>\n"), WITHOUT_PROMPT]
)
def test_what_generation_is_fed_begins_what_is_trained_on(template: str) -> None:
    tokenizer = _tokenizer(template)
    whole = _one(tokenizer, _chat(CHAT[1:]))
    fed = cli_text.encode(tokenizer, CHAT[1]["content"], chat=True)
    assert whole.tokens[: len(fed)].tolist() == fed
    assert whole.loss_mask[: len(fed)].sum() == 0
    for end, runs in ((1, 0), (3, 1)):
        prompt = encode_chat(tokenizer, CHAT[1:][:end], "it", is_prompt=True)
        assert end > 1 or prompt.tokens.tolist() == fed
        size = len(prompt.tokens)
        np.testing.assert_array_equal(whole.tokens[:size], prompt.tokens)
        np.testing.assert_array_equal(whole.loss_mask[:size], prompt.loss_mask)
        assert whole.loss_mask[size] and len(_predicted(tokenizer, prompt)) == runs


@pytest.mark.parametrize(
    ("template", "turns", "predicted"),
    [
        # Answers that stand elsewhere in the conversation are not confused.
        (CHATML, ("Say ok ok", "ok", "ok", "ok ok"), ["ok<|end|>", "ok ok<|end|>"]),
        # A token that joins prompt and answer is predicted.
        (JOINS, ("Why?", "so"), ["sso<|end|>"]),
        (THINKS, ("Why?", "so"), ["<think>\n\n</think>so<|end|>"]),
    ],
)
def test_answers_are_found_by_their_place(
    template: str, turns: tuple[str, ...], predicted: list[str]
) -> None:
    tokenizer = _tokenizer(template)
    roles = ("user", "assistant") * 2
    chat = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]
    assert _predicted(tokenizer, _one(tokenizer, _chat(chat))) == predicted


def test_a_sentencepiece_tokenizer_gets_the_same_masks(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "models" / "stories260K", 512)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
        "{{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}"
        "{% endfor %}"
    )
    sample = _one(tokenizer, _chat(CHAT[1:]))
    assert _predicted(tokenizer, sample) == ["A poet 漢 </s>", "She\n\nwrites </s>"]
    fed = cli_text.encode(tokenizer, CHAT[1]["content"], chat=True)
    assert sample.tokens[: len(fed)].tolist() == fed
    assert np.flatnonzero(sample.loss_mask)[0] == len(fed)


def test_a_plain_text_is_predicted_but_for_its_start_token() -> None:
    from tokenizers import processors

    tokenizer = _tokenizer()
    sample = _one(tokenizer, Example(where="line 1", text="so so"))
    fed = cli_text.encode(tokenizer, "so so", chat=False)
    assert sample.tokens.tolist() == [*fed, tokenizer.eos_token_id]
    assert sample.loss_mask.tolist() == [False] + [True] * len(fed)
    # An end token that the tokenizer adds is not added twice.
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 258), ("</s>", 259)]
    )
    sample = _one(tokenizer, Example(where="line 1", text="so"))
    assert sample.tokens.tolist().count(259) == 1


def test_exact_ids_need_no_tokenizer_and_stay_as_they_are() -> None:
    ids = np.array([7, 5, 6], np.int32)
    sample = _one(None, Example(where="line 1", ids=ids))
    assert sample.tokens.tolist() == [7, 5, 6]
    assert sample.loss_mask.tolist() == [False, True, True]
    mask = np.array([True, False, True])
    sample = _one(None, Example(where="line 1", ids=ids, loss_mask=mask))
    assert sample.loss_mask.tolist() == [False, False, True]
    assert mask[0]  # What was given is left alone.


def test_ids_of_another_target_are_refused() -> None:
    example = Example(where="line 9", ids=np.array([1, 512], np.int32))
    refused(
        lambda: _one(None, example, vocab_size=512),
        "line 9 has the id 512,",
        "only 512",
    )
    _one(None, example, vocab_size=513)
    refused(lambda: _one(_tokenizer(), example), "the id 512")
    text = Example(where="line 9", text="<|eot|>")
    refused(lambda: _one(_tokenizer(), text, vocab_size=1), "line 9 has the id")


def test_a_long_text_is_cut_into_consecutive_pieces() -> None:
    tokenizer = _tokenizer()
    example = Example(where="line 1", text="abcdefghij")
    whole = _one(tokenizer, example).tokens
    assert len(whole) == 12
    encoded = encode_examples([example], tokenizer, max_length=5)
    assert encoded.num_cut == 1
    np.testing.assert_array_equal(
        np.concatenate([s.tokens for s in encoded.samples]), whole
    )
    assert [s.loss_mask.tolist() for s in encoded.samples] == [
        [False, True, True, True, True],
        [False, True, True, True, True],
        [False, True],
    ]
    assert (
        "3 samples | 12 tokens, 9 of them predicted | 1 too long" in encoded.summary()
    )
    # A last piece of one token, of which nothing is predicted, is left out.
    pieces = encode_examples([example], tokenizer, max_length=11).samples
    assert [len(piece.tokens) for piece in pieces] == [11]


def test_a_long_conversation_keeps_its_beginning() -> None:
    tokenizer = _tokenizer(CHATML)
    whole = _one(tokenizer, _chat(CHAT))
    size = len(whole.tokens) - 3
    encoded = encode_examples([_chat(CHAT)], tokenizer, max_length=size)
    assert encoded.num_cut == 1 and len(encoded.samples) == 1
    np.testing.assert_array_equal(encoded.samples[0].tokens, whole.tokens[:size])
    np.testing.assert_array_equal(encoded.samples[0].loss_mask, whole.loss_mask[:size])
    # One that is cut before its answer is left out.
    long = [{"role": "user", "content": "a" * 400}, CHAT[2]]
    encoded = encode_examples([_chat(long), _chat(CHAT)], tokenizer, max_length=size)
    assert len(encoded.samples) == 1 and encoded.num_empty == 1
    assert "1 left out, with nothing to predict" in encoded.summary()


@pytest.mark.parametrize(
    ("template", "fits", "reason", "remedy"),
    [
        (
            REFUSES,
            CHAT[1:],
            "the chat template refuses the conversation: No system",
            "",
        ),
        (
            *(THINKS, CHAT[1:3]),
            "the chat template renders turn 3 differently when it is the last one",
            "enclose them in {% generation %} in chat_template.jinja, or give chats of",
        ),
    ],
)
def test_conversations_that_the_template_refuses_are_left_out_and_counted(
    template: str, fits: list[dict[str, str]], reason: str, remedy: str
) -> None:
    tokenizer = _tokenizer(template)
    chats = [_chat(CHAT, "line 4"), _chat(fits), _chat(CHAT, "line 6")]
    encoded = encode_examples(chats, tokenizer, max_length=512)
    assert len(encoded.samples) == 1 and len(encoded.refused) == 2
    assert f"2 left out (line 4: {reason}" in encoded.summary()
    alone = [_chat(CHAT, "line 4")]
    refused(
        lambda: encode_examples(alone, tokenizer, max_length=512),
        f"nothing is left to train on: line 4: {reason}",
        remedy,
    )
    assert remedy in encoded.summary()
    with pytest.raises(RefusedError, match=f"line 4: {reason}"):
        encode_chat(tokenizer, CHAT[:4], "line 4", is_prompt=True)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "the tokenizer has none; add a chat_template.jinja"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
         "{% endfor %}", "1 left out, with nothing to predict"),
        ("{% for m in messages %}", "no valid template"),
        ("{{ raise_exception('never') }}", "refuses the conversation: never"),
    ],
)  # fmt: skip
def test_a_template_that_shows_no_answer_is_refused(
    template: str | None, named: str
) -> None:
    refused(lambda: _one(_tokenizer(template), _chat(CHAT, "line 7")), named)


def test_conversations_need_a_tokenizer_of_the_fast_kind() -> None:
    refused(lambda: check_template(None), "the tokenizer has none")

    @dataclasses.dataclass
    class Slow:
        chat_template: str = CHATML
        is_fast: bool = False

    refused(lambda: check_template(Slow()), "add a tokenizer.json")
