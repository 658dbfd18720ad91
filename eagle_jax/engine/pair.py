"""Text in, text out: a target with its drafter."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from eagle_jax.config import require
from eagle_jax.decoding.decoder import AcceptanceRule, Decoder
from eagle_jax.engine import wording
from eagle_jax.engine.calls import engine_for, make_engine, warm_up
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.engine import Engine
from eagle_jax.engine.fit_check import FitCheck
from eagle_jax.engine.keywords import CallKeywords, RequestKeywords, TextKeywords, shown
from eagle_jax.engine.needs import BatchNeeds
from eagle_jax.engine.request import Request, each_sample, request_of
from eagle_jax.engine.text import Generation, Piece, Text
from eagle_jax.engine.wording import Prompt, as_prompts
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter, Params, Target
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import PairSharding

if TYPE_CHECKING:
    from eagle_jax.engine.open import Draft

_OF_PROMPT = ("system", "chat_template_kwargs", "truncate_prompt_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pair:
    """A target and its drafter, whose weights are read when they are first needed.

    Reading the weights of a large target takes minutes; prompts and lengths can be
    refused before.

    Attributes:
        target: The target. Static.
        config: The method, and the settings that a call does not give.
        make_drafter: The function that makes a drafter of the method's settings for a
            rule of acceptance; `None` for plain decoding.
        read_params: The function that reads or makes the weights of both, and returns
            them with the sharding of both; it is called once.
        read_tokenizer: The function that reads the `transformers` tokenizer, or returns
            `None` where only ids are needed.
        vocab_size: The number of tokens the target knows, `V`.
        max_positions: The most tokens of a prompt and its text together.
        stop_tokens: The token ids that end a text.
        placement: The target's sharding; `None` for the default device.
        draft: The model that the method drafts with, `None` if there is none.
        bits: The bits of the matrices of the target's layers, 8 or 4; `None` if they
            are not quantized.
        folder: The folder of the target's files, `None` if it has none.
        defaults: The settings of requests that the target's folder asks for.
        fit_check: What the first rounds accepted; `None` for random weights and none.
        kept: What was read or made: pairs of the same weights and placement share it.
    """

    target: Target
    config: PairConfig
    make_drafter: Callable[[Any, AcceptanceRule], Drafter | None]
    read_params: Callable[["Pair"], tuple[Params, PairSharding | None]]
    read_tokenizer: Callable[[], Any]
    vocab_size: int
    max_positions: int
    stop_tokens: tuple[int, ...] = ()
    placement: PairSharding | None = None
    draft: "Draft | None" = None
    bits: int | None = None
    folder: Path | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fit_check: FitCheck | None = None
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        target: Target,
        params: Params,
        *,
        max_positions: int,
        drafter: Drafter | None = None,
        tokenizer: Any = None,
        stop_tokens: Sequence[int] = (),
        config: PairConfig | None = None,
    ) -> "Pair":
        """Returns a pair of anybody's own models, for its `generate` and `engine`.

        Args:
            target: The target. Static.
            params: The `Params` of target and drafter.
            max_positions: The most tokens of a prompt and its text together.
            drafter: The drafter, whatever the acceptance rule; `None` for plain
                decoding. Static.
            tokenizer: A `transformers` tokenizer; `None` if prompts are token ids.
            stop_tokens: The token ids that end a text.
            config: The settings that a call does not give.
        """
        return cls(
            target=target,
            config=(config or PairConfig()).fixed,
            make_drafter=lambda settings, rule: drafter,
            read_params=lambda pair: (params, None),
            read_tokenizer=lambda: tokenizer,
            vocab_size=Decoder(target=target).vocab_size(params),
            max_positions=max_positions,
            stop_tokens=tuple(stop_tokens),
        )

    def __repr__(self) -> str:
        """Shows the names, sizes and the method."""
        if not isinstance(self.target, Transformer):
            return f"Pair({type(self.target).__name__}, {self.drafter})"
        name = "target" if self.folder is None else self.folder.name
        size = f"{self.sizes.num_layers} layers of {self.sizes.layer.hidden_size}"
        levels = "" if self.drafter is None else f" {self.drafter.depth} deep"
        return f"Pair({name!r}, {size}, {self.dtype}, {self.config.method}{levels})"

    def load(self) -> Self:
        """Reads the weights now; returns the pair.

        Raises:
            InputError: If the weights or the tokenizer cannot be read.
        """
        _ = self.params, self.tokenizer
        return self

    @property
    def params(self) -> Params:
        """The weights of target and drafter."""
        return self._weights[0]

    @property
    def sharding(self) -> PairSharding | None:
        """The sharding of the pair's arrays; `None` for the default device."""
        return self._weights[1]

    @property
    def _weights(self) -> tuple[Params, PairSharding | None]:
        placed, weights = self.kept.get(self.read_params, (self, None))
        if placed is not self.placement:
            placed, weights = self.placement, self.read_params(self)
            self.kept[self.read_params] = placed, weights
        return weights

    @property
    def tokenizer(self) -> Any:
        """The pair's `transformers` tokenizer, `None` where only ids are needed.

        Raises:
            InputError: If the folder holds no usable one.
        """
        return self.read_tokenizer()

    @property
    def sizes(self) -> TransformerConfig:
        """The target's sizes; only a target that was read from files has them."""
        assert isinstance(self.target, Transformer)
        return self.target.config

    @property
    def dtype(self) -> str:
        """The type of the target's weights and caches."""
        return str(getattr(self.target, "dtype", ""))

    @property
    def num_parts(self) -> int:
        """The parts that a batch's rows are split into."""
        return 1 if self.placement is None else self.placement.mesh.shape["data"]

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the pair's own settings; `None` for plain decoding."""
        return self.drafter_for(self.config.rule)

    def drafter_for(self, rule: AcceptanceRule) -> Drafter | None:
        """Returns the drafter for a rule of acceptance, made once."""
        key = self.make_drafter, self.config.own, rule
        if key not in self.kept:
            self.kept[key] = self.make_drafter(self.config.own, rule)
        return self.kept[key]

    def with_drafter(self, drafter: Drafter | None) -> Self:
        """Returns the pair with another drafter, `None` for none."""
        make, config = lambda settings, rule: drafter, self.config.fixed
        return dataclasses.replace(self, make_drafter=make, config=config)

    @shown(TextKeywords)
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
        pair, fields = self._for_call(more)
        texts = pair.texts(prompts, settings, chat=chat, **fields)
        engine_for(pair, texts, batch_size).write()
        return [text.result() for text in texts]

    @shown(TextKeywords)
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
        pair, fields = self._for_call(more)
        texts = pair.texts(prompts, settings, chat=chat, **fields)
        for text in texts:
            text.is_watched = True
        for text in engine_for(pair, texts, batch_size).run():
            yield text.piece()

    @shown(TextKeywords)
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

    @shown(CallKeywords)
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
        pair, fields = self._for_call(settings)
        return warm_up(pair, pair.request(**fields), prompt_length, batch_size)

    @shown(RequestKeywords)
    def request(self, **settings: Unpack[RequestKeywords]) -> Request:
        """Returns the settings of a request.

        Args:
            **settings: Fields of `Request`. What is not given is what the pair's
                own settings say, or the target's `generation_config.json`, unless the
                pair was loaded with `generation_config="none"`.
        """
        return request_of(self.config.request, self.defaults, settings)

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
            truncate_prompt_tokens: The number of last tokens kept; `None` for all.
        """
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            prompt = wording.encode(
                self.tokenizer, prompt, chat_template_kwargs, chat=chat, system=system
            )
        if (most := truncate_prompt_tokens) is not None:
            require(most >= 1, "truncate_prompt_tokens", most, "at least 1")
            prompt = prompt[-most:]
        return list(prompt)

    def texts(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Request | Sequence[Request] | None = None,
        *,
        chat: bool = False,
        **more: Any,
    ) -> list[Text]:
        """Returns the texts that prompts ask for, the samples of each one by one.

        Arguments and errors are those of `generate`, but for those of a whole call.
        """
        how = {name: more.pop(name) for name in _OF_PROMPT if name in more}
        encoded = [self.encode(one, chat=chat, **how) for one in as_prompts(prompts)]
        if settings is None:
            settings = self.request(**more)
        elif more:
            told = f"{next(iter(more))} is given beside `settings`; give one of them"
            raise InputError(told)
        asked = each_sample(encoded, settings)
        return [self.text(*one, index=index) for index, one in enumerate(asked)]

    def text(self, ids: Sequence[int], request: Request, *, index: int = 0) -> Text:
        """Returns one text after a prompt's ids, of which `n` is not read."""
        tokenizer = self.tokenizer
        needs = BatchNeeds.of(request, tokenizer, self.stop_tokens, self.vocab_size)
        return Text(ids, request, needs=needs, tokenizer=tokenizer, index=index)

    def engine(
        self,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        compiles_beside: bool = False,
    ) -> Engine:
        """Returns an engine, through whose rows texts go; reads the weights.

        >>> engine = pair.engine(batch_size=4)  # doctest: +SKIP
        >>> for text in pair.texts(["def f", "class A"]):  # doctest: +SKIP
        ...     _ = engine.add(text)
        >>> for text in engine.run():  # doctest: +SKIP
        ...     print(text.index, text.token_ids)

        Args:
            batch_size: The number of rows, `B`; over a mesh, the next multiple of its
                parts.
            max_length: The largest number of tokens of prompt and output together;
                `None` for the target's positions.
            compiles_beside: Whether threads compile, so that no running text waits.

        Raises:
            InputError: If the target has fewer positions, or memory too little room.
        """
        return make_engine(self, batch_size, max_length, compiles_beside)

    def _for_call(self, more: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Returns the pair with the settings of a whole call, and the other ones."""
        fields = dict(more)
        whole = {name: fields.pop(name, None) for name in ("acceptance", "max_length")}
        return dataclasses.replace(self, config=self.config.with_(**whole)), fields
