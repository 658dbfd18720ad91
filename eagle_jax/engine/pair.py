"""Text in, text out: a target with its drafter, from names or folders."""

import asyncio
import dataclasses
import functools
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

import jax
import numpy as np

from eagle_jax.checkpoints import check_max_length
from eagle_jax.config import require
from eagle_jax.constraints.grammar import compile_grammar
from eagle_jax.decoding.growth import capacity_ends
from eagle_jax.decoding.requests import bucket_ends, bucket_length, bucket_rows
from eagle_jax.engine import text
from eagle_jax.engine.batches import decode_all
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.keywords import (
    CallKeywords,
    RequestKeywords,
    TextKeywords,
    shown,
)
from eagle_jax.engine.pairs import LoadedPair, PairSource
from eagle_jax.engine.request import (
    Asked,
    Request,
    each_sample,
    request_of,
)
from eagle_jax.engine.results import Generation, Piece, Pieces
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.scheduler import Scheduler
from eagle_jax.engine.shared import Grammar, Shared
from eagle_jax.errors import InputError
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import PairSharding

_OF_CALL = ("acceptance", "max_length")
_OF_PROMPT = ("system", "chat_template_kwargs", "truncate_prompt_tokens")

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = (
    str | Sequence[int] | np.ndarray | jax.Array | Message | Sequence[Message]
)
"""A text, token ids, or the messages of a conversation."""

_MOST_ROWS = 8


class _Group(NamedTuple):
    """Texts of a call that are decoded by one runner.

    Attributes:
        runner: What decodes them.
        places: Their places among the call's texts.
        asked: Their prompts and settings.
    """

    runner: Runner
    places: list[int]
    asked: list[Asked]

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts' token ids."""
        return [ids for ids, _ in self.asked]

    @property
    def settings(self) -> list[Request]:
        """The settings of each."""
        return [one for _, one in self.asked]


class Pair:
    """A target and its drafter, whose weights are read when they are first needed.

    Attributes:
        source: The target's sizes, the drafter and the tokenizer.
        config: The method, and the settings that a call does not give.
        sharding: The sharding of the target's arrays; `None` for the default device.
        defaults: The settings of requests that the target's folder asks for.
    """

    def __init__(
        self,
        source: PairSource,
        config: PairConfig,
        sharding: PairSharding | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps what is opened, and reads nothing."""
        self.source = source
        self.config = config
        self.sharding = sharding
        self.defaults = dict(defaults or {})

    @functools.cached_property
    def loaded(self) -> LoadedPair:
        """The models and their weights, for callers that drive the loop themselves."""
        return self.source.load(self.sharding)

    def load(self) -> "Pair":
        """Reads the weights now; returns the pair."""
        _ = self.loaded
        return self

    def __repr__(self) -> str:
        """Shows the names, sizes and the method."""
        source, layer = self.source, self.source.config.layer
        name = "target" if source.folder is None else source.folder.name
        size = f"{source.config.num_layers} layers of {layer.hidden_size}"
        levels = "" if source.drafter is None else f" {source.drafter.depth} deep"
        return f"Pair({name!r}, {size}, {source.dtype}, {source.method.name}{levels})"

    @property
    def tokenizer(self) -> Any:
        """The pair's `transformers` tokenizer."""
        return self.source.tokenizer

    @shown(TextKeywords, Request)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Request | Sequence[Request] | None = None,
        *,
        batch_size: int | None = None,
        chat: bool = False,
        **more: Unpack[TextKeywords],
    ) -> list[Generation]:
        """Continues prompts; the text is the target's own, token for token.

        With `acceptance="rejection"` it has the target's distribution instead. Programs
        are compiled for the shapes that a call meets, and kept.

        Args:
            prompts: One prompt or many; ids are taken as they are.
            settings: The settings of all requests, or of each; `None` for those of
                `Pair.request`.
            batch_size: The number of prompts decoded together; `None` for all, 8 at
                most. Of more prompts, each begins as soon as a text has ended.
            chat: Whether texts are wrapped as a user's turn in the tokenizer's chat
                template.
            **more: Fields of `Request` instead of `settings`; arguments of
                `encode`; and of the whole call `acceptance` (see `PairConfig`) and
                `max_length`, the largest number of tokens of prompt and output
                together. `None` stands for the default, of `seed` for a random one.
                Where all share their settings, prompt `i` of `n` samples draws with
                `seed + i * n`.

        Returns:
            The continuations in the order of their prompts, `n` of each.

        Raises:
            InputError: If a prompt cannot be encoded or leaves no room for a token,
                a setting is unknown or outside its range, or `regex` or `json_schema`
                cannot be used.
        """
        asked, whole = self._read(prompts, settings, more, chat=chat)
        found: dict[int, Generation] = {}
        for group in self._groups(asked, whole, batch_size):
            done = decode_all(group.runner, group.prompts, group.settings)
            for place, served in zip(group.places, done, strict=True):
                found[place] = Generation.of(self.tokenizer, served)
        return [found[place] for place in range(len(asked))]

    @shown(TextKeywords, Request)
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Request | Sequence[Request] | None = None,
        *,
        batch_size: int | None = None,
        chat: bool = False,
        **more: Unpack[TextKeywords],
    ) -> Iterator[Piece]:
        """Continues prompts and yields their texts piece by piece, once per round.

        The arguments are those of `generate`, and the pieces of a text together are
        what it returns. `for piece in pair.stream("x"): print(piece, end="")` shows it.
        """
        asked, whole = self._read(prompts, settings, more, chat=chat)
        pieces = Pieces(self.tokenizer)
        for group in self._groups(asked, whole, batch_size):
            scheduler = Scheduler(group.runner)
            for place, (ids, one) in zip(group.places, group.asked, strict=True):
                scheduler.add(place, ids, one, is_streamed=True)
            while not scheduler.is_idle:
                yield from map(pieces.next, scheduler.step())

    @shown(TextKeywords, Request)
    async def astream(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Request | Sequence[Request] | None = None,
        *,
        batch_size: int | None = None,
        chat: bool = False,
        **more: Unpack[TextKeywords],
    ) -> AsyncIterator[Piece]:
        """Yields what `stream` does, for `async for`; a thread waits for the device."""
        pieces = self.stream(
            prompts, settings, batch_size=batch_size, chat=chat, **more
        )
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    @shown(RequestKeywords, Request)
    def request(self, **settings: Unpack[RequestKeywords]) -> Request:
        """Returns the settings of a request.

        Args:
            **settings: Fields of `Request`. What is not given is what the pair's
                own settings say, or the target's `generation_config.json`, unless the
                pair was loaded with `generation_config="none"`.
        """
        return request_of(self.config.request, self.defaults, settings)

    def _read(
        self,
        prompts: Any,
        settings: Request | Sequence[Request] | None,
        more: Mapping[str, Any],
        *,
        chat: bool,
    ) -> tuple[list[Asked], dict[str, Any]]:
        """Returns the texts that a call asks for, and the settings of all of it."""
        whole = {name: more[name] for name in _OF_CALL if name in more}
        how = {name: more[name] for name in _OF_PROMPT if name in more}
        fields = {name: x for name, x in more.items() if name not in whole | how}
        given = text.as_prompts(prompts)
        encoded = [self.encode(prompt, chat=chat, **how) for prompt in given]
        if settings is None:
            settings = self.request(**fields)
        elif fields:
            raise InputError(
                f"{next(iter(fields))} is given beside `settings`; give one of them"
            )
        return each_sample(encoded, settings), whole

    def _groups(
        self, asked: list[Asked], whole: Mapping[str, Any], batch_size: int | None
    ) -> Iterator[_Group]:
        """Yields the texts that share a constraint, and so a program."""
        most = _MOST_ROWS if batch_size is None else batch_size
        heat = max(one.temperature for _, one in asked)
        config = self.config.with_(temperature=heat, batch_size=most, **whole)
        rows = config.batch_size
        places: dict[str | None, list[int]] = {}
        for place, (_, one) in enumerate(asked):
            places.setdefault(one.grammar, []).append(place)
        groups = [(some, [asked[place] for place in some]) for some in places.values()]
        # All are checked before the first is decoded.
        runners = [self.runner(texts, config, rows) for _, texts in groups]
        for runner, (some, texts) in zip(runners, groups, strict=True):
            yield _Group(runner, some, texts)

    @shown(CallKeywords, Request)
    def warm_up(
        self,
        prompt_length: int,
        *,
        batch_size: int = 1,
        **settings: Unpack[CallKeywords],
    ) -> float:
        """Compiles the programs of later calls of `generate` without a constraint.

        There are few: prompts are padded to 64, 256, 1024, ... tokens, caches have room
        for 256, 512, 1024, ... and batches 1, 2, 4, ... rows.

        Args:
            prompt_length: The tokens of the longest prompt.
            batch_size: The most prompts of a call.
            **settings: The settings of the calls, as `generate` takes them, with the
                largest `max_new_tokens`.

        Returns:
            The seconds that it took.

        Raises:
            InputError: If a prompt of that length leaves no room for a token, or a
                setting is unknown or outside its range.
        """
        started = time.perf_counter()
        fields: dict[str, Any] = dict(settings)
        whole = {name: fields.pop(name) for name in _OF_CALL if name in fields}
        most = self.request(**fields)
        config = self.config.with_(temperature=most.temperature, **whole)
        for rows, length in itertools.product(
            sorted({bucket_rows(rows) for rows in range(1, batch_size + 1)}),
            bucket_ends(prompt_length),
        ):
            for limit in capacity_ends(length, most.max_new_tokens):
                one = dataclasses.replace(most, max_new_tokens=limit)
                runner = self.runner([([0] * length, one)] * rows, config, rows)
                runner.warm_up(by_round=False, with_growth=True)
        return time.perf_counter() - started

    def encode(
        self,
        prompt: Any,
        *,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[int]:
        """Returns a prompt's token ids.

        Args:
            prompt: See `generate`.
            chat: See `generate`.
            system: What the system says at the beginning of a conversation.
            chat_template_kwargs: More arguments of the tokenizer's
                `apply_chat_template`: `tools`, `documents`, `chat_template` (the name
                of one of several), and variables such as `enable_thinking`.
            truncate_prompt_tokens: The number of last tokens that are kept; `None` for
                all.
        """
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            variables = chat_template_kwargs or {}
            ids = text.encode(
                self.tokenizer, prompt, variables, chat=chat, system=system
            )
        else:
            ids = list(prompt)
        if truncate_prompt_tokens is None:
            return ids
        least = truncate_prompt_tokens
        require(least >= 1, "truncate_prompt_tokens", least, "at least 1")
        return ids[-truncate_prompt_tokens:]

    def runner(
        self, asked: Sequence[Asked], config: PairConfig, batch_size: int
    ) -> Runner:
        """Returns what decodes batches; reads the weights once all is checked.

        Args:
            asked: The texts, which share a constraint.
            config: All settings, with the pair's method.
            batch_size: The largest number of texts decoded together; few texts get few
                rows.

        Raises:
            InputError: If a prompt leaves no room for a token, the rounds cannot be in
                memory, or the expression or schema cannot be used.
        """
        source = self.source
        sizes = source.config
        if config.max_length is not None:
            check_max_length(sizes, config.max_length)
        max_length = _longest_text(sizes, config, asked)
        parts = 1 if self.sharding is None else self.sharding.mesh.shape["data"]
        each, most = -(-len(asked) // parts), -(-batch_size // parts)
        rows = parts * min(bucket_rows(each), most)
        samples = asked[0][1].n
        if all(one.n == samples for _, one in asked) and samples <= most:
            # As many as read each prompt once.
            rows = (
                parts * samples * min(bucket_rows(-(-each // samples)), most // samples)
            )
        source.check_memory(batch_size=rows, max_length=max_length)
        grammar = self.compile(Grammar.of(asked[0][1]))
        shared = Shared.of([one for _, one in asked], self.loaded)
        return Runner(
            pair=self.loaded.with_automaton(grammar and grammar.tables),
            drafter=source.make_drafter(config.tree, config.rule),
            config=config,
            max_length=max_length,
            prompt_bucket=bucket_length(max(len(ids) for ids, _ in asked)),
            batch_size=rows,
            shared=dataclasses.replace(shared, grammar=grammar),
        )

    def scheduler(
        self,
        *,
        batch_size: int = _MOST_ROWS,
        max_length: int | None = None,
        acceptance: Literal["coupled", "rejection"] = "coupled",
    ) -> Scheduler:
        """Returns a queue of requests through the rows of one running batch.

        >>> scheduler = pair.scheduler(batch_size=4)  # doctest: +SKIP
        >>> scheduler.add("a", pair.encode("def f"), pair.request())  # doctest: +SKIP
        >>> while not scheduler.is_idle:  # doctest: +SKIP
        ...     for served in scheduler.step():
        ...         print(served.key, served.row.generated_ids)

        Args:
            batch_size: The number of rows, `B`.
            max_length: The largest number of tokens of prompt and output together;
                `None` for the target's positions.
            acceptance: See `PairConfig`.

        Raises:
            InputError: If the rounds cannot be in memory.
        """
        longest = max_length or self.source.config.max_positions
        one = dataclasses.replace(self.request(), max_new_tokens=longest - 1)
        config = self.config.with_(
            temperature=one.temperature, acceptance=acceptance, max_length=longest
        )
        first = self.runner([([0], one)] * batch_size, config, batch_size)

        def change(shared: Shared) -> Runner:
            heat = float(shared.is_sampled)
            grammar = self.compile(shared.grammar)
            config = first.config.with_(temperature=heat, acceptance=acceptance)
            rule = config.rule
            return dataclasses.replace(
                first,
                pair=self.loaded.with_automaton(grammar and grammar.tables),
                drafter=self.source.make_drafter(config.tree, rule),
                config=config,
                shared=dataclasses.replace(shared, grammar=grammar),
            )

        return Scheduler(first, change)

    def compile(self, grammar: Grammar | None) -> Grammar | None:
        """Returns a constraint with its tables, for `Scheduler.add`.

        Raises:
            InputError: If it cannot be used.
        """
        if grammar is None or grammar.tables is not None:
            return grammar
        source = self.source
        given = source.stop_tokens, source.config.vocab_size, grammar.given
        tables = compile_grammar(self.tokenizer, *given)
        return dataclasses.replace(grammar, tables=tables)


def _longest_text(
    target: TransformerConfig, config: PairConfig, asked: Sequence[Asked]
) -> int:
    """Returns the length of the longest text, in tokens, prompt and output together."""
    needed = max(len(ids) + one.max_new_tokens for ids, one in asked)
    # More slots would cost time for nothing.
    max_length = min(config.max_length or target.max_positions, needed)
    for number, (ids, _) in enumerate(asked):
        if len(ids) >= max_length:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens, but prompt and output "
                f"together may have {max_length}; shorten it or raise `max_length` "
                f"(the target has {target.max_positions} positions)"
            )
    return max_length
