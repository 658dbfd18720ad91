"""Keyword arguments of pairs and calls, as editors, type checkers and `help` see them.

Each repeats the fields of settings by their names; `None` stands for what holds without
it.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from eagle_jax.config import Acceptance, DraftQuantization, Dtype, Quantization
from eagle_jax.engine.request import Request

Function = TypeVar("Function", bound=Callable[..., Any])


class RequestKeywords(TypedDict, total=False):
    """Fields of `Request`; a `seed` of `None` is drawn."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None
    stop: str | Sequence[str] | None
    include_stop_str_in_output: bool | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: str | Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    no_repeat_ngram_size: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    regex: str | None
    json_schema: str | Mapping[str, Any] | None


class PairKeywords(RequestKeywords, total=False):
    """Fields of `PairConfig`, of the own settings of methods, and of `Request`.

    A method refuses settings of another.
    """

    method: str | None
    tree: Any
    acceptance: Acceptance | None
    max_length: int | None
    batch_size: int | None
    dtype: Dtype | None
    quantization: Quantization | None
    draft_vocabulary: str | None
    draft_quantization: DraftQuantization | None
    request: Request | None
    num_nodes: int | None
    depth: int | None
    width: int | None
    rank_by: Literal["value", "confidence"] | None
    rerank: bool | None
    calibration: str | None
    shared_noise: bool | None
    choices: str | None
    level: int | None
    window: int | None
    guesses: int | None
    max_ngram: int | None
    min_match: int | None
    datastore: str | None


class CallKeywords(RequestKeywords, total=False):
    """Those of a request, and of the whole call."""

    acceptance: Acceptance | None
    max_length: int | None


class TextKeywords(CallKeywords, total=False):
    """Those of a call, and of how its prompts are read, see `Pair.encode`."""

    system: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    truncate_prompt_tokens: int | None


def shown(keywords: Any) -> Callable[[Function], Function]:
    """Returns a decorator by which `help` and notebooks show a function's keywords."""

    def decorate(function: Function) -> Function:
        plain = inspect.signature(function)
        *shown, last = plain.parameters.values()
        one = last.replace(kind=last.KEYWORD_ONLY, default=None)
        for name, hint in typing.get_type_hints(keywords).items():
            shown.append(one.replace(name=name, annotation=hint))
        function.__dict__["__signature__"] = plain.replace(parameters=shown)
        return function

    return decorate
