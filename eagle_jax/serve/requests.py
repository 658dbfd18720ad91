"""From the body of a request to prompts and settings."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from eagle_jax.config import require
from eagle_jax.engine import Pair, Request, Text
from eagle_jax.errors import InputError, one_line
from eagle_jax.parsing import check_type, parse_json
from eagle_jax.serve.errors import ServeError, no_model

IGNORED = frozenset(
    [
        *("user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    ]
)
"""Fields that say nothing about the text."""

# What all texts wait for while one asks for it: OpenAI has bounds, too.
_MOST_STRINGS, _LONGEST_STRING, _MOST_BIASES = 128, 256, 1024

_OF_COMPLETIONS = 16  # OpenAI's default; a chat goes on as long as it can.
_MOST_LOGPROBS = 20
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_OF_CHOICE = ("model", "stream", "stream_options", "logprobs")
_OF_PROMPT = ("chat_template_kwargs", "truncate_prompt_tokens")

Found: TypeAlias = tuple[str, str, Any]  # A field, the setting that it is, its value.


def _strings(value: Any, name: str) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        told = f"{name} must be a string or a list of strings"
        raise InputError(told, setting=name)
    if len(found) > _MOST_STRINGS or max(map(len, found), default=0) > _LONGEST_STRING:
        raise InputError(
            f"{name} may hold {_MOST_STRINGS} strings of {_LONGEST_STRING} characters",
            setting=name,
        )
    return found


def _ids(value: Any, name: str) -> list[int]:
    if isinstance(value, list) and all(type(one) is int for one in value):
        return value
    raise InputError(f"{name} must be a list of whole numbers", setting=name)


def _stop_ids(value: Any, name: str) -> list[int]:
    if len(found := _ids(value, name)) > _MOST_STRINGS:
        raise InputError(f"{name} may hold {_MOST_STRINGS} ids", setting=name)
    return found


def _biases(value: Any, name: str) -> dict[int, float]:
    if len(_object(value, name)) > _MOST_BIASES:
        raise InputError(f"{name} may hold {_MOST_BIASES} ids", setting=name)
    # Python reads other digits, signs, spaces and underscores as numbers, too.
    if not all(re.fullmatch("[0-9]{1,10}", id_) for id_ in value):
        raise InputError(
            f"{name} must map token ids, in digits, to numbers", setting=name
        )
    found = {int(id_): check_type(float, one, name) for id_, one in value.items()}
    if len(found) < len(value):
        raise InputError(f"{name} names a token twice", setting=name)
    return found


def _object(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise InputError(f"{name} must be an object", setting=name)


def _schema(value: Any, name: str) -> str | dict[str, Any]:
    return value if isinstance(value, str) else _object(value, name)


_SETTINGS: dict[str, tuple[str, Callable[[Any, str], Any] | type]] = {
    **dict.fromkeys(["max_tokens", "max_completion_tokens"], ("max_new_tokens", int)),
    "min_tokens": ("min_new_tokens", int),
    "guided_regex": ("regex", str),
    "guided_json": ("json_schema", _schema),
    "stop": ("stop", _strings),
    "bad_words": ("bad_words", _strings),
    "stop_token_ids": ("stop_token_ids", _stop_ids),
    "logit_bias": ("logit_bias", _biases),
    **{
        name: (name, kind)
        for kind, names in (
            (int, "n seed top_k no_repeat_ngram_size"),
            (bool, "ignore_eos include_stop_str_in_output skip_special_tokens"),
            (float, "temperature top_p min_p presence_penalty frequency_penalty"),
            (float, "repetition_penalty"),
        )
        for name in names.split()
    },
}
"""Each field of OpenAI's or vLLM's, the setting that it is here, and its type."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRequest:
    """What a client asks for.

    Attributes:
        texts: The texts, the samples of each prompt one by one.
        num_samples: The samples of each prompt.
        is_streamed: Whether pieces are sent as they come.
        with_usage: Whether a stream ends with its counts of tokens.
        tokenizer: The pair's `transformers` tokenizer.
    """

    texts: list[Text]
    tokenizer: Any
    num_samples: int
    is_streamed: bool
    with_usage: bool

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(len(x.prompt_ids) for x in self.texts[:: self.num_samples])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads requests to one pair.

    Attributes:
        pair: The pair.
        model: The name that it is served under.
        max_length: The most tokens of a prompt and its text together.
        max_texts: The most texts of a request.
    """

    pair: Pair
    model: str
    max_length: int
    max_texts: int

    def read(self, body: bytes, *, is_chat: bool) -> TextRequest:
        """Returns what the body of a request asks for.

        Args:
            body: The bytes.
            is_chat: Whether it holds messages, instead of prompts.

        Raises:
            InputError: If it cannot be had.
        """
        fields = parse_json(body, "the body")
        if not isinstance(fields, dict):
            raise InputError("the body must be an object")
        _check_unicode(fields)
        fields = {name: x for name, x in fields.items() if x is not None}
        self._check_names(fields, is_chat)
        try:
            settings = self._settings(fields, is_chat)
            field = "messages" if is_chat else "prompt"
            prompts = _messages(fields) if is_chat else _prompts(fields)
            if len(prompts) * settings.n > self.max_texts:
                raise ServeError(
                    f"{len(prompts)} prompts with n = {settings.n} are more texts than "
                    f"the {self.max_texts} that the server takes",
                    setting="n",
                )
            encoded = [self._encode(one, fields, field) for one in prompts]
            stream = _stream(fields)
            texts = self.pair.texts(encoded, settings)
            for text in texts:
                text.is_watched = stream["is_streamed"]
            return TextRequest(
                texts=texts,
                tokenizer=self.pair.tokenizer,
                num_samples=settings.n,
                **stream,
            )
        except InputError as error:
            if error.setting not in fields:  # It may be missing, or lie in another.
                error.setting = None
            raise

    def _check_names(self, fields: Mapping[str, Any], is_chat: bool) -> None:
        """Refuses another model, and what nobody would read."""
        known = {*_SETTINGS, *_OF_CHOICE, *IGNORED, "truncate_prompt_tokens"}
        known |= {"response_format", "structured_outputs"}
        chat = {"messages", "top_logprobs", "chat_template_kwargs"}
        for name in fields:
            if name not in known | (chat if is_chat else {"prompt"}):
                told = f"the field {name!r} is not supported here"
                raise ServeError(told, setting=one_line(name))
        if fields.get("model", self.model) != self.model:
            raise no_model(fields["model"], self.model)

    def _settings(self, fields: Mapping[str, Any], is_chat: bool) -> Request:
        most = self.max_length if is_chat else _OF_COMPLETIONS
        given: dict[str, Any] = {"max_new_tokens": most, "seed": None}
        names: dict[str, str] = {}
        found = _plain(fields), _constraints(fields), _logprobs(fields, is_chat)
        for name, setting, value in itertools.chain(*found):
            if setting in names:
                told = f"{names[setting]} and {name} are both given"
                raise InputError(told, setting=name)
            given[setting], names[setting] = value, name
        try:
            return self.pair.request(**given)
        except InputError as error:
            told = str(error)
            for setting, usual in _RENAMED.items():
                told = told.replace(setting, names.get(setting, usual))
            raise InputError(told, setting=names.get(error.setting or "")) from error

    def _encode(self, prompt: Any, fields: Mapping[str, Any], field: str) -> list[int]:
        how = {name: fields[name] for name in _OF_PROMPT if name in fields}
        name = "chat_template_kwargs"
        if "{" in str(_object(how.get(name, {}), name).get("chat_template")):
            # It would be run, and might never end.
            raise ServeError("chat_template must be the name of one", setting=name)
        check_type(int, how.get("truncate_prompt_tokens", 1), "truncate_prompt_tokens")
        ids = self.pair.encode(prompt, **how)
        if len(ids) >= self.max_length:
            raise ServeError(
                f"the prompt has {len(ids)} tokens, but prompt and text together may "
                f"have {self.max_length}",
                setting=field,
                code="context_length_exceeded",
            )
        return ids


def _plain(fields: Mapping[str, Any]) -> Iterator[Found]:
    for name in filter(_SETTINGS.__contains__, fields):
        setting, kind = _SETTINGS[name]
        read = functools.partial(check_type, kind) if isinstance(kind, type) else kind
        yield name, setting, read(fields[name], name)


def _constraints(fields: Mapping[str, Any]) -> Iterator[Found]:
    """Yields the constraints that stand in objects of their own."""
    name = "structured_outputs"
    for kind, value in _object(fields.get(name, {}), name).items():
        if kind not in ("regex", "json"):
            raise ServeError(
                f"{name} may hold regex or json, not {kind!r}", setting=name
            )
        is_regex = kind == "regex"
        read = check_type(str, value, name) if is_regex else _schema(value, name)
        yield name, "regex" if is_regex else "json_schema", read
    name = "response_format"
    form = _object(fields.get(name, {"type": "text"}), name)
    kind = form.get("type")
    if kind == "json_schema":
        held = _object(form.get("json_schema"), f"{name}.json_schema")
        schema = _object(held.get("schema"), f"{name}.json_schema.schema")
        yield name, "json_schema", schema
    elif kind != "text":
        raise ServeError(
            f"{name} of type {kind!r} is not supported; give text, or json_schema with "
            "a schema",
            setting=name,
        )


def _logprobs(fields: Mapping[str, Any], is_chat: bool) -> Iterator[Found]:
    """Yields how many log-probabilities are asked for; chats say it in two fields."""
    name = "top_logprobs" if is_chat else "logprobs"
    is_asked = name in fields
    if is_chat:
        is_asked = check_type(bool, fields.get("logprobs", False), "logprobs")
        if name in fields and not is_asked:
            raise ServeError(f"{name} needs logprobs: true", setting=name)
    if is_asked:
        count = check_type(int, fields.get(name, 0), name)
        require(0 <= count <= _MOST_LOGPROBS, name, count, f"0 to {_MOST_LOGPROBS}")
        yield name, "logprobs", count


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    given = fields.get("prompt")
    is_one = isinstance(given, str) or (
        isinstance(given, list) and bool(given) and type(given[0]) is int
    )
    prompts = [given] if is_one else given
    if isinstance(prompts, list) and prompts:
        ids = [one for one in prompts if not isinstance(one, str)]
        if all(_ids(one, "prompt") for one in ids):
            return prompts
    raise InputError(
        "prompt must be a text, token ids, or a list of these", setting="prompt"
    )


def _messages(fields: Mapping[str, Any]) -> list[Any]:
    """Returns the conversation, as the one prompt that it is."""
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise InputError(
            "messages must be a list of at least one message", setting="messages"
        )
    return [[_message(one) for one in given]]


def _message(given: Any) -> dict[str, str]:
    message = {
        name: x for name, x in _object(given, "messages").items() if x is not None
    }
    for name in message:
        if name not in ("role", "content", "name"):
            told = f"the field {name!r} of a message is not supported here"
            raise ServeError(told, setting="messages")
    parts = message.get("content")
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        message["content"] = "".join(map(_part, parts))
    if not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise InputError(
            "messages must have a role and a content, which are strings",
            setting="messages",
        )
    return message


def _part(given: Any) -> str:
    part = _object(given, "messages")
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise InputError("messages may hold parts of type text alone", setting="messages")


def _stream(fields: Mapping[str, Any]) -> dict[str, bool]:
    is_streamed = check_type(bool, fields.get("stream", False), "stream")
    options = _object(fields.get("stream_options", {}), "stream_options")
    known = "include_usage", "include_obfuscation"  # The second one pads, for TLS.
    if not options.keys() <= set(known):
        told = f"stream_options may hold {' and '.join(known)} alone"
        raise InputError(told, setting="stream_options")
    with_usage, _ = (check_type(bool, options.get(x, False), x) for x in known)
    return {"is_streamed": is_streamed, "with_usage": with_usage and is_streamed}


def _check_unicode(fields: Mapping[str, Any]) -> None:
    """Refuses half a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError("the body holds what is no valid Unicode text") from error
