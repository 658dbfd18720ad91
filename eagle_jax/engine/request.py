"""The settings of one request, in the names of the field."""

import dataclasses
import json
import operator
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from eagle_jax.checkpoints.hf_fields import Fields, stop_tokens, warn_once
from eagle_jax.config import SamplingConfig, require
from eagle_jax.decoding.logprobs import LogprobsMode
from eagle_jax.engine.config import PairConfig
from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.parsing import check_type, read_json
from eagle_jax.processors import ProcessorConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of one request, as vLLM and transformers name them.

    Attributes:
        max_new_tokens: The largest number of tokens to generate.
        min_new_tokens: The number of tokens before which no stop token may come, and up
            to which no stop string ends the text.
        temperature: See `SamplingConfig`, as for the next four.
        top_p: See `SamplingConfig`.
        top_k: See `SamplingConfig`.
        min_p: See `SamplingConfig`.
        seed: The seed of its draws, of its first sample's if there are several; 0
            follows the last one, `2**32 - 1`.
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
            of the most likely ones at its place; `None` for none.
        prompt_logprobs: The same of the prompt's tokens.
        logprobs_mode: "raw_logprobs" of the target's own distribution, or
            "processed_logprobs" of the one that tokens are drawn from.
        skip_special_tokens: Whether texts are written without special tokens.
        regex: A regular expression that the text matches as a whole, if it is not cut
            short; see `grammar.compile_grammar`. `None` for any text.
        json_schema: A JSON schema, text or object, instead of a `regex`.

    Raises:
        InputError: If a value is outside its range, or two contradict each other.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    bad_words: str | Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    no_repeat_ngram_size: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    skip_special_tokens: bool = True
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        for name in ("max_new_tokens", "n"):
            _require_whole(name, getattr(self, name), least=1)
        for name in ("min_new_tokens", "no_repeat_ngram_size"):
            _require_whole(name, getattr(self, name))
        _require_whole("seed", self.seed, end=2**32)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name), least=0)
        most = self.max_new_tokens
        wanted = f"at most max_new_tokens = {most}"
        require(
            self.min_new_tokens <= most, "min_new_tokens", self.min_new_tokens, wanted
        )
        check_type(LogprobsMode, self.logprobs_mode, "logprobs_mode")
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        stops = [_require_whole("stop_token_ids", id_) for id_ in self.stop_token_ids]
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        if self.include_stop_str_in_output and not self.stop:
            raise InputError(
                "include_stop_str_in_output keeps the string that ended a text, but "
                "`stop` holds none",
                setting="include_stop_str_in_output",
            )
        names = ("temperature", "top_p", "top_k", "min_p")
        SamplingConfig(**{name: getattr(self, name) for name in names})
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
        same = "repetition_penalty presence_penalty frequency_penalty logit_bias"
        same += " no_repeat_ngram_size min_new_tokens"
        # After a space most tokenizers write a word in another way.
        texts = [x for word in self.bad_words for x in (word, " " + word.lstrip())]
        words: list[list[int]] = []
        if tokenizer is not None:
            words = [tokenizer(x, add_special_tokens=False).input_ids for x in texts]
        return ProcessorConfig(
            **{name: getattr(self, name) for name in same.split()},
            bad_words=[*self.bad_words_ids, *filter(None, words)],
        )

    def stops(self, tokenizer: Any, own: Sequence[int]) -> list[int]:
        """Returns the ids of the tokens that end a text, those of the target's `own`.

        A tokenizer, or `None`, says which strings of `stop` are special tokens.
        """
        found = [*self.stop_token_ids, *(() if self.ignore_eos else own)]
        if self.stop and self.skip_special_tokens and tokenizer is not None:
            added = tokenizer.added_tokens_decoder.items()
            found += [n for n, x in added if x.special and x.content in self.stop]
        return found


Asked: TypeAlias = tuple[list[int], Request]
"""The token ids of a prompt, and what is asked for after them."""


def each_sample(
    prompts: Sequence[list[int]], settings: Request | Sequence[Request]
) -> list[Asked]:
    """Returns the texts that are asked for, the samples of each prompt one by one.

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


def request_of(
    config: PairConfig,
    defaults: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Request:
    """Returns the settings of a request.

    Args:
        config: The settings of the command or the pair that it is made to.
        defaults: What holds instead of the default of a setting, see
            `checkpoint_defaults`.
        given: What holds in any case; a seed of `None` is drawn, any other `None`
            stands for what would hold without it.

    Raises:
        InputError: If one is unknown or outside its range.
    """
    known = [field.name for field in dataclasses.fields(Request)]
    given = dict(given or {})
    for name in given:
        if name not in known:
            near = did_you_mean(name, known)
            raise InputError(
                f"{name!r} is no setting; known are {', '.join(known)}{near}"
            )
    if "seed" in given and given["seed"] is None:
        given["seed"] = secrets.randbelow(2**30)  # Every prompt's may be given again.
    values: dict[str, Any] = dict(defaults or {})
    least = values.get("min_new_tokens")
    for table in (config.sampling, config.decoding):
        usual = vars(type(table)())
        values |= {
            name: value
            for name, value in vars(table).items()
            if name in known and value != usual[name]
        }
    values |= {name: value for name, value in given.items() if value is not None}
    most = values.get("max_new_tokens", Request.max_new_tokens)
    if least and given.get("min_new_tokens") is None and isinstance(most, int):
        values["min_new_tokens"] = min(least, most)  # Nobody asked for more.
    return Request(**values)


_OF_DRAWS = "temperature top_p top_k min_p typical_p epsilon_cutoff eta_cutoff top_h"
_FOLLOWED = """temperature top_p top_k min_p repetition_penalty no_repeat_ngram_size
    bad_words_ids max_new_tokens min_new_tokens"""
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
    names = [name for name in _FOLLOWED.split() if record.get(name) is not None]
    found = {name: record[name] for name in names}
    if is_sampled:
        found.setdefault("temperature", 1.0)
    left = [
        name
        for name in _LEFT_OUT.split()
        if (x := record.get(name)) and not (x == 1 and name in _FACTORS.split())
    ]
    try:
        found["stop"] = record.get("stop_strings") or ()
        ends = [[token] for token in stop_tokens(folder)]
        words = [ids for ids in found.get("bad_words_ids", []) if ids not in ends]
        banned = record.get("suppress_tokens") or []
        words += [[id_] for id_ in banned if 0 <= id_ < vocab_size]
        biases = {tuple(ids): x for ids, x in record.get("sequence_bias") or []}
        found["bad_words_ids"] = words
        found["logit_bias"] = {ids[0]: x for ids, x in biases.items() if len(ids) == 1}
        left += ["sequence_bias"] * (len(biases) > len(found["logit_bias"]))
        asked = request_of(PairConfig(), found)
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


def _require_whole(name: str, value: Any, least: int = 0, end: int = 2**31) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        told = f"{name} = {value!r} must be a whole number"
        raise InputError(told, setting=name) from None
    require(least <= whole < end, name, whole, f"{least} to {end - 1}")
    return whole


def _strings(name: str, given: Any) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else tuple(given)
    for one in strings:
        if not isinstance(one, str) or not one:
            told = f"{name} holds {one!r}; give strings that are not empty"
            raise InputError(told, setting=name)
    return strings
