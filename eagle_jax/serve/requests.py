"""From the body of a request to prompts and settings."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from eagle_jax.config import require
from eagle_jax.engine import Request, Text
from eagle_jax.engine.request import outside_names
from eagle_jax.errors import InputError, one_line
from eagle_jax.parsing import check_type, hints_of, parse_json
from eagle_jax.serve.driver import Driver
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
_OF_CHOICE = ("model", "stream", "stream_options", "logprobs")
_OF_PROMPT = ("chat_template_kwargs", "truncate_prompt_tokens")

_SETTINGS = outside_names("openai")
_USUAL = {setting: name for name, setting in reversed(_SETTINGS.items())}

Found: TypeAlias = tuple[str, str, Any]  # A field, the setting that it is, its value.


def _check(holds: bool, name: str, wanted: str) -> None:
    """Refuses what a field holds."""
    if not holds:
        raise ServeError(f"{name} {wanted}", setting=name)


def _strings(value: Any, name: str) -> list[str]:
    found = [value] if isinstance(value, str) else value
    is_list = isinstance(found, list) and all(isinstance(one, str) for one in found)
    _check(is_list, name, "must be a string or a list of strings")
    longest = max(map(len, found), default=0)
    is_short = len(found) <= _MOST_STRINGS and longest <= _LONGEST_STRING
    wanted = f"may hold {_MOST_STRINGS} strings of {_LONGEST_STRING} characters"
    _check(is_short, name, wanted)
    return found


def _ids(value: Any, name: str) -> list[int]:
    is_list = isinstance(value, list) and all(type(one) is int for one in value)
    _check(is_list, name, "must be a list of whole numbers")
    return value


def _stop_ids(value: Any, name: str) -> list[int]:
    found = _ids(value, name)
    _check(len(found) <= _MOST_STRINGS, name, f"may hold {_MOST_STRINGS} ids")
    return found


def _biases(value: Any, name: str) -> dict[int, float]:
    is_short = len(_object(value, name)) <= _MOST_BIASES
    _check(is_short, name, f"may hold {_MOST_BIASES} ids")
    # Python reads other digits, signs, spaces and underscores as numbers, too.
    are_ids = all(re.fullmatch("[0-9]{1,10}", id_) for id_ in value)
    _check(are_ids, name, "must map token ids, in digits, to numbers")
    found = {int(id_): check_type(float, one, name) for id_, one in value.items()}
    _check(len(found) == len(value), name, "names a token twice")
    return found


def _object(value: Any, name: str) -> dict[str, Any]:
    _check(isinstance(value, dict), name, "must be an object")
    return value


def _schema(value: Any, name: str) -> str | dict[str, Any]:
    return value if isinstance(value, str) else _object(value, name)


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    str | Sequence[str]: _strings,
    Sequence[int]: _stop_ids,
    Mapping[int, float]: _biases,
    str | Mapping[str, Any] | None: _schema,
}
"""How values are read whose type JSON does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRequest:
    """What a client asks for.

    Attributes:
        texts: The texts, the samples of each prompt one by one.
        num_prompt_tokens: The tokens of all prompts.
        is_streamed: Whether pieces are sent as they come.
        with_usage: Whether a stream ends with its counts of tokens.
        counts_along: Whether each of its pieces has those so far, too.
        tokenizer: The pair's `transformers` tokenizer.
    """

    texts: list[Text]
    tokenizer: Any
    num_prompt_tokens: int
    is_streamed: bool
    with_usage: bool
    counts_along: bool


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads requests to what a driver writes.

    Attributes:
        driver: What writes, and says how long and how many texts may be.
        model: The name that its pair is served under.
    """

    driver: Driver
    model: str

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
            if len(prompts) * settings.n > self.driver.max_texts:
                raise ServeError(
                    f"{len(prompts)} prompts with n = {settings.n} are more texts than "
                    f"the {self.driver.max_texts} that the server takes",
                    setting="n",
                )
            encoded = [self._encode(one, fields, field) for one in prompts]
            stream = _stream(fields)
            texts = self.driver.pair.texts(encoded, settings)
            for text in texts:
                text.is_watched = stream["is_streamed"]
            return TextRequest(
                texts=texts,
                tokenizer=self.driver.pair.tokenizer,
                num_prompt_tokens=sum(map(len, encoded)),
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
        most = self.driver.max_length if is_chat else _OF_COMPLETIONS
        given: dict[str, Any] = {"max_new_tokens": most, "seed": None}
        names: dict[str, str] = {}
        found = _plain(fields), _constraints(fields), _logprobs(fields, is_chat)
        for name, setting, value in itertools.chain(*found):
            if setting in names:
                told = f"{names[setting]} and {name} are both given"
                raise InputError(told, setting=name)
            given[setting], names[setting] = value, name
        try:
            return self.driver.pair.request(**given)
        except InputError as error:
            usual = _USUAL | names
            told = re.sub(r"\w+(?= = )", lambda x: usual.get(x[0], x[0]), str(error))
            raise InputError(told, setting=names.get(error.setting or "")) from error

    def _encode(self, prompt: Any, fields: Mapping[str, Any], field: str) -> list[int]:
        how = {name: fields[name] for name in _OF_PROMPT if name in fields}
        name = "chat_template_kwargs"
        if "{" in str(_object(how.get(name, {}), name).get("chat_template")):
            # It would be run, and might never end.
            raise ServeError("chat_template must be the name of one", setting=name)
        check_type(int, how.get("truncate_prompt_tokens", 1), "truncate_prompt_tokens")
        ids = self.driver.pair.encode(prompt, **how)
        if len(ids) >= self.driver.max_length:
            raise ServeError(
                f"the prompt has {len(ids)} tokens, but prompt and text together may "
                f"have {self.driver.max_length}",
                setting=field,
                code="context_length_exceeded",
            )
        return ids


def _plain(fields: Mapping[str, Any]) -> Iterator[Found]:
    for name in filter(_SETTINGS.__contains__, fields):
        hint = hints_of(Request)[_SETTINGS[name]]
        read = _READERS.get(hint, functools.partial(check_type, hint))
        yield name, _SETTINGS[name], read(fields[name], name)


def _constraints(fields: Mapping[str, Any]) -> Iterator[Found]:
    """Yields the constraints that stand in objects of their own."""
    name = "structured_outputs"
    for kind, value in _object(fields.get(name, {}), name).items():
        is_known = kind in ("regex", "json")
        _check(is_known, name, f"may hold regex or json, not {kind!r}")
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
    else:
        instead = "is not supported; give text, or json_schema with a schema"
        _check(kind == "text", name, f"of type {kind!r} {instead}")


def _logprobs(fields: Mapping[str, Any], is_chat: bool) -> Iterator[Found]:
    """Yields how many log-probabilities are asked for; chats say it in two fields."""
    name = "top_logprobs" if is_chat else "logprobs"
    is_asked = name in fields
    if is_chat:
        is_asked = check_type(bool, fields.get("logprobs", False), "logprobs")
        _check(is_asked or name not in fields, name, "needs logprobs: true")
    if is_asked:
        count = check_type(int, fields.get(name, 0), name)
        require(0 <= count <= _MOST_LOGPROBS, name, count, f"0 to {_MOST_LOGPROBS}")
        yield name, "logprobs", count


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    given = fields.get("prompt")
    is_one = isinstance(given, str) or (
        isinstance(given, list) and bool(given) and type(given[0]) is int
    )
    prompts: Any = [given] if is_one else given
    is_list = isinstance(prompts, list) and bool(prompts)
    holds = is_list and all(type(x) is str or _ids(x, "prompt") for x in prompts)
    _check(holds, "prompt", "must be a text, token ids, or a list of these")
    return prompts


def _messages(fields: Mapping[str, Any]) -> list[Any]:
    """Returns the conversation, as the one prompt that it is."""
    given: Any = fields.get("messages")
    is_list = isinstance(given, list) and bool(given)
    _check(is_list, "messages", "must be a list of at least one message")
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
    has_both = all(isinstance(message.get(name), str) for name in ("role", "content"))
    _check(has_both, "messages", "must have a role and a content, which are strings")
    return message


def _part(given: Any) -> str:
    part = _object(given, "messages")
    is_text = part.get("type") == "text" and isinstance(part.get("text"), str)
    _check(is_text, "messages", "may hold parts of type text alone")
    return part["text"]


def _stream(fields: Mapping[str, Any]) -> dict[str, bool]:
    is_streamed = check_type(bool, fields.get("stream", False), "stream")
    options = _object(fields.get("stream_options", {}), "stream_options")
    # The second one is vLLM's, and the third one pads, for TLS.
    known = "include_usage", "continuous_usage_stats", "include_obfuscation"
    is_known = options.keys() <= set(known)
    _check(is_known, "stream_options", f"may hold {', '.join(known)} alone")
    with_usage, always, _ = (check_type(bool, options.get(x, False), x) for x in known)
    with_usage &= is_streamed
    return {
        "is_streamed": is_streamed,
        "with_usage": with_usage,
        "counts_along": with_usage and always,
    }


def _check_unicode(fields: Mapping[str, Any]) -> None:
    """Refuses half a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError("the body holds what is no valid Unicode text") from error
