"""The settings of one request, in the names of the field."""

import dataclasses
import functools
import json
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from eagle_jax.checkpoints.hf_fields import Fields, stop_tokens, warn_once
from eagle_jax.config import DRAWS, Range, Without, require, setting
from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.parsing import check_type, hints_of, read_json
from eagle_jax.processors import ProcessorConfig

_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of one request, as vLLM and transformers name them.

    What `regex` and `json_schema` may hold says `grammar.compile_grammar`.

    Attributes:
        max_new_tokens: The largest number of tokens to generate.
        min_new_tokens: The number of tokens before which no stop token may come, and up
            to which no stop string ends the text.
        temperature: The divisor of the logits, or 0 for the most likely token; those
            below 1e-6 count as 1e-6.
        top_p: Keep the most likely tokens with at least this mass; 1 keeps all.
        top_k: Keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this likely, relative to the most likely one; 0
            keeps all.
        seed: The seed of its draws, of its first sample's if there are several; the
            next ones draw with the next seeds, and 0 follows the last, `2**32 - 1`.
        n: The number of samples; sample `i` draws with `seed + i`.
        stop: A string or several; the text ends before the first that it contains. A
            special token is a stop token where texts are written without them.
        include_stop_str_in_output: Whether the string that ended the text stays in it.
        stop_token_ids: More token ids that end the text, beside the target's own.
        ignore_eos: Whether to go on after the target's own stop tokens.
        repetition_penalty: The factor by which tokens of the prompt and the text become
            less likely; 1 is off.
        presence_penalty: What is taken from the logits of tokens of the text, -2 to 2.
        frequency_penalty: What is taken from them for each time they occur, -2 to 2.
        logit_bias: What is added to the logits of some tokens, by id.
        bad_words: Strings that no text contains, as the tokenizer writes them, alone
            and after a space.
        bad_words_ids: Lists of token ids that no text contains in a row.
        no_repeat_ngram_size: The length of token sequences that occur once; 0 is off.
        logprobs: Whether to return the log-probability of every token, and of so many
            of the most likely ones at its place, in the target's own distribution;
            `None` for none.
        prompt_logprobs: The same of the prompt's tokens.
        skip_special_tokens: If false, texts keep special tokens.
        regex: A regular expression that the text matches as a whole, if it is not cut
            short (needs the extra "grammar"); `None` for any text.
        json_schema: A JSON schema, text or object, instead of a `regex`; a command also
            takes the name of a file.

    Raises:
        InputError: If a value is outside its range, or two contradict each other.
    """

    max_new_tokens: int = setting(
        128,
        Range(1, _MOST),
        openai="max_tokens max_completion_tokens",
        checkpoint="max_new_tokens",
    )
    min_new_tokens: int = setting(
        0, Range(0, _MOST), openai="min_tokens", checkpoint="min_new_tokens"
    )
    temperature: float = setting(0.0, DRAWS["temperature"], checkpoint="temperature")
    top_p: float = setting(1.0, DRAWS["top_p"], checkpoint="top_p")
    top_k: int = setting(0, DRAWS["top_k"], checkpoint="top_k")
    min_p: float = setting(0.0, DRAWS["min_p"], checkpoint="min_p")
    seed: int = setting(0, Range(0, 2**32 - 1))
    n: int = setting(1, Range(1, _MOST), flag="num_samples")
    stop: str | Sequence[str] = setting((), checkpoint="stop_strings")
    include_stop_str_in_output: bool = setting(
        False, flag=Without("a command's text ends before what ended it")
    )
    stop_token_ids: Sequence[int] = setting((), Range(0, _MOST))
    ignore_eos: bool = setting(False)
    repetition_penalty: float = setting(1.0, checkpoint="repetition_penalty")
    presence_penalty: float = setting(0.0)
    frequency_penalty: float = setting(0.0)
    logit_bias: Mapping[int, float] = setting(dict)
    bad_words: str | Sequence[str] = setting(())
    bad_words_ids: Sequence[Sequence[int]] = setting(
        (),
        flag=Without("`bad_words` says it in texts"),
        openai=Without("`bad_words` says it in texts"),
        checkpoint="bad_words_ids",
    )
    no_repeat_ngram_size: int = setting(
        0, Range(0, _MOST), checkpoint="no_repeat_ngram_size"
    )
    logprobs: int | None = setting(
        None,
        Range(0, _MOST),
        openai=Without("`logprobs` of completions is a number, of chats a truth value"),
    )
    prompt_logprobs: int | None = setting(
        None, Range(0, _MOST), openai=Without("answers have no place for them")
    )
    skip_special_tokens: bool = setting(True, flag="keep_special_tokens")
    regex: str | None = setting(None, openai="guided_regex")
    json_schema: str | Mapping[str, Any] | None = setting(None, openai="guided_json")

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        for name, check, within in _checks():
            object.__setattr__(self, name, check(name, getattr(self, name), within))
        least, most = self.min_new_tokens, self.max_new_tokens
        wanted = f"at most max_new_tokens = {most}"
        require(least <= most, "min_new_tokens", least, wanted)
        if self.include_stop_str_in_output and not self.stop:
            raise InputError(
                "include_stop_str_in_output keeps the string that ended a text, but "
                "`stop` holds none",
                setting="include_stop_str_in_output",
            )
        _ = self.processors(None), self.grammar

    @property
    def grammar(self) -> str | None:
        """The constraint as JSON, `None` for none; texts that share it share tables."""
        if self.regex is None and self.json_schema is None:
            return None
        if self.regex is not None and self.json_schema is not None:
            raise InputError(
                "`regex` and `json_schema` are both given; a text has one of them"
            )
        try:
            return json.dumps([self.regex, self.json_schema], allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"`regex` or `json_schema` is no JSON: {error}") from error

    def processors(self, tokenizer: Any) -> ProcessorConfig:
        """Returns what changes the target's logits by the text so far.

        Args:
            tokenizer: A `transformers` tokenizer, which `bad_words` are written with;
                `None` leaves them out.
        """
        names = [field.name for field in dataclasses.fields(ProcessorConfig)]
        # After a space most tokenizers write a word in another way.
        texts = [x for word in self.bad_words for x in (word, " " + word.lstrip())]
        words: list[list[int]] = []
        if tokenizer is not None:
            words = [tokenizer(x, add_special_tokens=False).input_ids for x in texts]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given["bad_words"] = [*self.bad_words_ids, *filter(None, words)]
        return ProcessorConfig(**given)

    def stops(self, tokenizer: Any, own: Sequence[int]) -> list[int]:
        """Returns the ids of the tokens that end a text, those of the target's `own`.

        A tokenizer, or `None`, says which strings of `stop` are special tokens.
        """
        found = [*self.stop_token_ids, *(() if self.ignore_eos else own)]
        if self.stop and self.skip_special_tokens and tokenizer is not None:
            added = tokenizer.added_tokens_decoder.items()
            found += [n for n, x in added if x.special and x.content in self.stop]
        return found


def each_sample(
    prompts: Sequence[list[int]], settings: Request | Sequence[Request]
) -> list[tuple[list[int], Request]]:
    """Returns prompts with what is asked for after them, the samples one by one.

    Args:
        prompts: The prompts' token ids.
        settings: The settings of each; or those of all, and then prompt `i` of `n`
            samples begins with the seed `seed + i * n`.

    Raises:
        InputError: If there are settings for another number of prompts.
    """
    if isinstance(settings, Request):
        one = settings
        settings = [
            dataclasses.replace(one, seed=(one.seed + place * one.n) % 2**32)
            for place in range(len(prompts))
        ]
    if len(settings) != len(prompts):
        raise InputError(
            f"`settings` holds those of {len(settings)} requests, but there are "
            f"{len(prompts)} prompts"
        )
    return [
        (ids, dataclasses.replace(one, seed=(one.seed + sample) % 2**32))
        for ids, one in zip(prompts, settings, strict=True)
        for sample in range(one.n)
    ]


def outside_names(by: Literal["openai", "checkpoint"]) -> dict[str, str]:
    """Returns the settings by their names elsewhere.

    Args:
        by: Whose: "openai" of HTTP requests, "checkpoint" of `generation_config.json`.
    """
    found = {}
    for field in dataclasses.fields(Request):
        names = field.metadata.get(by, field.name if by == "openai" else "")
        if not isinstance(names, Without):
            found |= dict.fromkeys(names.split(), field.name)
    return found


def request_of(
    usual: Request,
    defaults: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Request:
    """Returns the settings of a request.

    Args:
        usual: The settings of the command or the pair that it is made to.
        defaults: What holds instead of the default of a setting, see
            `checkpoint_defaults`.
        given: What holds in any case; a seed of `None` is drawn, any other `None`
            stands for what would hold without it.

    Raises:
        InputError: If one is unknown or outside its range.
    """
    known = vars(usual)
    given = dict(given or {})
    for name in given:
        if name not in known:
            told = f"{name!r} is no setting; known are {', '.join(known)}"
            raise InputError(told + did_you_mean(name, known))
    if "seed" in given and given["seed"] is None:
        given["seed"] = secrets.randbelow(2**30)  # Every prompt's may be given again.
    values: dict[str, Any] = dict(defaults or {})
    plain = vars(Request())
    said = {name: value for name, value in known.items() if value != plain[name]}
    said |= {name: value for name, value in given.items() if value is not None}
    least = values.get("min_new_tokens")
    values |= said
    most = values.get("max_new_tokens", Request.max_new_tokens)
    if least and "min_new_tokens" not in said and isinstance(most, int):
        values["min_new_tokens"] = min(least, most)  # Nobody asked for more.
    return Request(**values)


_OF_DRAWS = "temperature top_p top_k min_p typical_p epsilon_cutoff eta_cutoff top_h"
# These change texts where they are not null, 0, or 1 for the factors.
_FACTORS = "typical_p num_beams num_beam_groups guidance_scale"
_LEFT_OUT = f"""{_FACTORS} epsilon_cutoff eta_cutoff top_h penalty_alpha min_length
    max_time token_healing forced_bos_token_id forced_eos_token_id begin_suppress_tokens
    exponential_decay_length_penalty force_words_ids constraints watermarking_config
    dola_layers assistant_ensemble_weight"""


def checkpoint_defaults(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Returns the settings that a checkpoint asks for, as fields of `Request`.

    They are those of its `generation_config.json`: without `do_sample` the temperature
    is 0 and no filter is set. Its stop tokens are read with the target. One warning
    names what changes texts in transformers and is no setting here.

    Args:
        folder: The target's folder.
        vocab_size: The number of tokens the target knows, `V`.

    Raises:
        InputError: If the file is no JSON object or a value lies outside its range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    fields = Fields(read_json(path), path)
    is_sampled = fields.flag("do_sample")
    fields.size("min_new_tokens", default=0, least=0)
    skipped = () if is_sampled else _OF_DRAWS.split()
    record = {name: x for name, x in fields.values.items() if name not in skipped}
    keys = outside_names("checkpoint")
    found = {name: record[x] for x, name in keys.items() if record.get(x) is not None}
    if is_sampled:
        found.setdefault("temperature", 1.0)
    left = [
        name
        for name in _LEFT_OUT.split()
        if (x := record.get(name)) and not (x == 1 and name in _FACTORS.split())
    ]
    try:
        stops = found.get("stop") or ()
        found["stop"] = [stops] if isinstance(stops, str) else [*stops]
        ends = [[token] for token in stop_tokens(folder)]
        words = [ids for ids in found.get("bad_words_ids", []) if ids not in ends]
        banned = record.get("suppress_tokens") or []
        words += [[id_] for id_ in banned if 0 <= id_ < vocab_size]
        biases = {tuple(ids): x for ids, x in record.get("sequence_bias") or []}
        found["bad_words_ids"] = words
        found["logit_bias"] = {ids[0]: x for ids, x in biases.items() if len(ids) == 1}
        left += ["sequence_bias"] * (len(biases) > len(found["logit_bias"]))
        asked = request_of(Request(), found)
        asked.processors(None).check_vocabulary(vocab_size)
    except (ValueError, TypeError) as error:
        lists = "bad_words_ids, suppress_tokens, sequence_bias and stop_strings"
        told = error if isinstance(error, InputError) else f"{lists} must be lists"
        told = f'{path}: {told}; mend it, or give generation_config="none"'
        raise InputError(told) from error
    if left:
        told = ", ".join(f"{name} = {record[name]!r}" for name in left)
        warn_once(f"{path}: not followed here, so texts may be other ones: {told}")
    usual = vars(Request())
    return {name: x for name, x in found.items() if x != usual[name] and x != []}


def _whole(name: str, value: Any, within: Range | None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        told = f"{name} = {value!r} must be a whole number"
        raise InputError(told, setting=name) from None
    if within is not None:
        within.check(name, whole)
    return whole


def _whole_or_none(name: str, value: Any, within: Range | None) -> int | None:
    return None if value is None else _whole(name, value, within)


def _wholes(name: str, given: Any, within: Range | None) -> tuple[int, ...]:
    return tuple(_whole(name, one, within) for one in _listed(name, given))


def _strings(name: str, given: Any, within: Range | None) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else _listed(name, given)
    for one in strings:
        if not isinstance(one, str) or not one:
            told = f"{name} holds {one!r}; give strings that are not empty"
            raise InputError(told, setting=name)
    return strings


def _listed(name: str, given: Any) -> tuple[Any, ...]:
    try:
        return tuple(given)
    except TypeError:
        raise InputError(f"{name} = {given!r} must be a list", setting=name) from None


def _scalar(hint: Any, name: str, value: Any, within: Range | None) -> Any:
    if type(value) is not hint:
        scalar = value.item() if getattr(value, "shape", None) == () else value
        value = check_type(hint, scalar, name)
    if within is not None:
        within.check(name, value)
    return value


Check: TypeAlias = Callable[[str, Any, Range | None], Any]

_CHECKS: dict[Any, Check] = {
    int: _whole,
    int | None: _whole_or_none,
    Sequence[int]: _wholes,
    str | Sequence[str]: _strings,
    **{hint: functools.partial(_scalar, hint) for hint in (float, bool)},
}


@functools.cache
def _checks() -> list[tuple[str, Check, Range | None]]:
    """Returns the fields whose type and range are checked here, and how."""
    hints = hints_of(Request)
    return [
        (field.name, _CHECKS[hints[field.name]], field.metadata.get("within"))
        for field in dataclasses.fields(Request)
        if hints[field.name] in _CHECKS
    ]
