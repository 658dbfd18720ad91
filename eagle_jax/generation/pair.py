"""Text in, text out: a target with its drafter, from names or folders."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from eagle_jax import assets
from eagle_jax.checkpoints import check_max_length
from eagle_jax.config import CONFIGS, DecodingConfig, load_config
from eagle_jax.decoding.growth import LEAST_LENGTH
from eagle_jax.decoding.rates import tokens_per_round
from eagle_jax.decoding.requests import bucket_length, bucket_rows
from eagle_jax.decoding.state import StopReason
from eagle_jax.errors import InputError
from eagle_jax.generation import text
from eagle_jax.generation.batches import decode_all
from eagle_jax.generation.config import GenerateConfig, of_call, with_settings
from eagle_jax.generation.grammar import compile_grammar, with_automaton
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.generation.runner import Runner
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import MeshShape, PairSharding, shard_pair

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = (
    str | Sequence[int] | np.ndarray | jax.Array | Message | Sequence[Message]
)
"""A text, token ids, or the messages of a conversation."""

_MOST_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
        text: The text that was added to the prompt.
        token_ids: The token ids of that text, a stop token included.
        prompt_ids: The token ids of the prompt.
        stop_reason: The reason why the text ended.
        accept_lengths: The number of drafted tokens that each round accepted, uncut by
            limits.
        seed: The seed that it drew with; given again, it draws the same text.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    stop_reason: StopReason
    accept_lengths: list[int]
    seed: int

    @property
    def tokens_per_round(self) -> float | None:
        """The tokens that a round emitted on average (tau); `None` without a round."""
        return tokens_per_round([len(self.token_ids)], len(self.accept_lengths))


class Pair:
    """A target and its drafter, whose weights are read when they are first needed.

    Attributes:
        source: The target's sizes, the drafter and the tokenizer.
        config: The method, and the settings that a call does not give.
        sharding: The sharding of the target's arrays; `None` for the default device.
    """

    def __init__(
        self,
        source: PairSource,
        config: GenerateConfig,
        sharding: PairSharding | None = None,
    ) -> None:
        """Keeps what is opened, and reads nothing."""
        self.source = source
        self.config = config
        self.sharding = sharding

    @functools.cached_property
    def loaded(self) -> LoadedPair:
        """The models and their weights, for callers that drive the loop themselves."""
        return self.source.load(self.sharding)

    def load(self) -> "Pair":
        """Reads the weights now; returns the pair."""
        _ = self.loaded
        return self

    @property
    def tokenizer(self) -> Any:
        """The pair's `transformers` tokenizer."""
        return self.source.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        batch_size: int | None = None,
        chat: bool = False,
        regex: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[Generation]:
        """Continues prompts; the text is the target's own, token for token.

        With `acceptance="rejection"` it has the target's distribution instead. Programs
        are compiled for the shapes that a call meets, and kept.

        Args:
            prompts: One prompt or many; ids are taken as they are.
            batch_size: The number of prompts decoded together; `None` for all, 8 at
                most. Of more prompts, each begins as soon as a text has ended.
            chat: Whether texts are wrapped as a user's turn in the tokenizer's chat
                template.
            regex: A regular expression that texts match as a whole, if they are not cut
                short; see `grammar.compile_grammar`. `None` for any text.
            json_schema: A JSON schema, text or object, instead of a `regex`.
            **settings: The settings of this call: fields of `SamplingConfig`
                (`temperature`, `top_p`, `top_k`, `min_p`, `seed`, `acceptance`) and of
                `DecodingConfig` (`max_new_tokens`, `max_length`, `ignore_eos`). `None`
                stands for the default, of `seed` for a random one. Prompt `i` draws
                with `seed + i`.

        Returns:
            The continuations, one per prompt, in order.

        Raises:
            InputError: If a prompt cannot be encoded or leaves no room for a token,
                a setting is unknown or outside its range, or `regex` or `json_schema`
                cannot be used.
        """
        grammar = {"regex": regex, "json_schema": json_schema}
        given = text.as_prompts(prompts)
        encoded = [self.encode(prompt, chat=chat) for prompt in given]
        most = _MOST_ROWS if batch_size is None else batch_size
        rows = DecodingConfig(batch_size=most).batch_size
        runner = self.runner(encoded, of_call(self.config, settings), rows, **grammar)
        seed = runner.config.sampling.seed
        seeds = range(seed, seed + len(encoded))
        texts = decode_all(runner, encoded, seeds)
        return [
            Generation(
                text=text.continuation(
                    self.tokenizer, row.prompt_ids, row.generated_ids
                ),
                token_ids=row.generated_ids,
                prompt_ids=row.prompt_ids,
                stop_reason=row.stop_reason,
                accept_lengths=row.accept_lengths,
                seed=seed,
            )
            for row, seed in zip((one.row for one in texts), seeds, strict=True)
        ]

    def warm_up(
        self, prompt_length: int, *, batch_size: int = 1, **settings: Any
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
        most = {"max_new_tokens": self.config.decoding.max_new_tokens} | settings
        for rows, length in itertools.product(
            sorted({bucket_rows(rows) for rows in range(1, batch_size + 1)}),
            _bucket_ends(prompt_length),
        ):
            for limit in _capacity_ends(length, most["max_new_tokens"]):
                config = of_call(self.config, most | {"max_new_tokens": limit})
                runner = self.runner([[0] * length] * rows, config, rows)
                runner.warm_up(by_round=False, with_growth=True)
        return time.perf_counter() - started

    def stream(
        self,
        prompt: Prompt,
        *,
        chat: bool = False,
        regex: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[str]:
        """Continues one prompt and yields its text piece by piece, once per round.

        The arguments are those of `generate`, and the pieces together are its text.
        """
        grammar = {"regex": regex, "json_schema": json_schema}
        prompts = text.as_prompts(prompt)
        if len(prompts) > 1:
            raise InputError(
                f"a stream continues one prompt, but {len(prompts)} were given; give "
                "one, or call `generate`"
            )
        ids = self.encode(prompts[0], chat=chat)
        runner = self.runner([ids], of_call(self.config, settings), 1, **grammar)
        shown = text.TextStream(self.tokenizer, ids)
        for (row,), _ in runner.rounds([ids], [runner.config.sampling.seed]):
            is_last = row.stop_reason != StopReason.RUNNING
            if piece := shown.update(row.generated_ids, is_last=is_last):
                yield piece

    def encode(self, prompt: Any, *, chat: bool = False) -> list[int]:
        """Returns a prompt's token ids, see `generate`."""
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            return text.encode(self.tokenizer, prompt, chat=chat)
        return list(prompt)

    def runner(
        self,
        encoded: list[list[int]],
        config: GenerateConfig,
        batch_size: int,
        *,
        regex: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
    ) -> Runner:
        """Returns what decodes batches; reads the weights once all is checked.

        Args:
            encoded: The prompts' token ids.
            config: All settings, with the pair's method.
            batch_size: The largest number of prompts decoded together; few prompts
                get few rows.
            regex: See `generate`.
            json_schema: See `generate`.

        Raises:
            InputError: If a prompt leaves no room for a token, the rounds cannot be in
                memory, or the expression or schema cannot be used.
        """
        source, decoding = self.source, config.decoding
        sizes = source.config
        if decoding.max_length is not None:
            check_max_length(sizes, decoding.max_length)
        max_length = _longest_text(sizes, decoding, encoded)
        parts = 1 if self.sharding is None else self.sharding.mesh.shape["data"]
        each, most = -(-len(encoded) // parts), -(-batch_size // parts)
        rows = parts * min(bucket_rows(each), most)
        source.check_memory(batch_size=rows, max_length=max_length)
        tables = compile_grammar(
            self.tokenizer,
            source.stop_tokens,
            sizes.vocab_size,
            regex=regex,
            json_schema=json_schema,
        )
        return Runner(
            pair=with_automaton(self.loaded, tables),
            drafter=source.make_drafter(config.tree, config.sampling.rule),
            config=config,
            max_length=max_length,
            prompt_bucket=bucket_length(max(map(len, encoded))),
            batch_size=rows,
        )


def load_pair(
    target: str,
    draft: str | None = None,
    config: GenerateConfig | None = None,
    *,
    mesh: MeshShape | None = None,
    is_lazy: bool = False,
    **settings: Any,
) -> Pair:
    """Loads a target and its drafter.

    Args:
        target: The target's Hugging Face folder or hub name.
        draft: The folder or hub name of the weights that the method drafts with: an
            EAGLE head, Medusa or Hydra heads, or a smaller model; `None` for a method
            without weights.
        config: The method, its settings, and those that a later call does not give;
            `None` for the defaults.
        mesh: The shape of the mesh that the models are sharded over, of which `data`
            divides the batch size of a `config` that is given; `None` for the default
            device.
        is_lazy: Whether weights are read when they are first needed, so that prompts
            and limits can be refused before.
        **settings: Settings that differ from `config`: fields of `DecodingConfig`
            (`method`, `dtype`, `quantization`, `draft_vocabulary`, ...), and `tree`,
            the method's own settings.

    Raises:
        InputError: If something is missing or does not fit, or a package that reading
            it needs is not installed.
    """
    rows = config and config.decoding.batch_size
    config = with_settings(config or GenerateConfig(), settings)
    config.method.check_draft(draft)
    try:
        source, sharding = open_pair(target, draft, config), None
        if mesh is not None:
            rows = mesh.data if rows is None else rows
            sharding = shard_pair(mesh, source.config, batch_size=rows)
        pair = Pair(source, config, sharding)
        return pair if is_lazy else pair.load()
    except ModuleNotFoundError as error:
        raise InputError(
            f"the package {error.name} is not installed, which reading checkpoints "
            "needs; pip install 'eagle-jax[hf]'"
        ) from error


def load_embedded_pair() -> Pair:
    """Loads the small pair that comes with the package, which writes Python.

    >>> pair = load_embedded_pair()  # doctest: +SKIP
    >>> pair.generate("def main():")[0].text  # doctest: +SKIP
    """
    config = load_config(CONFIGS / "embedded.toml", GenerateConfig)
    return load_pair(str(assets.TARGET), str(assets.HEAD), config)


def _longest_text(
    target: TransformerConfig, decoding: DecodingConfig, encoded: list[list[int]]
) -> int:
    """Returns the length of the longest text, in tokens, prompt and output together."""
    needed = max(map(len, encoded)) + decoding.max_new_tokens
    # More slots would cost time for nothing.
    max_length = min(decoding.max_length or target.max_positions, needed)
    for number, ids in enumerate(encoded):
        if len(ids) >= max_length:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens, but prompt and output "
                f"together may have {max_length}; shorten it or raise `max_length` "
                f"(the target has {target.max_positions} positions)"
            )
    return max_length


def _capacity_ends(prompt: int, most: int) -> list[int]:
    """Returns numbers of new tokens, one for each capacity up to that of the most.

    >>> _capacity_ends(prompt=255, most=800)
    [1, 257, 769, 800]
    """
    first = max(prompt, LEAST_LENGTH - 1).bit_length()
    powers = range(first, (prompt + most).bit_length())
    return [*(2**power - prompt for power in powers), most]


def _bucket_ends(longest: int) -> list[int]:
    """Returns the least and the largest length of each padded length of prompts."""
    lengths, least = [], 1
    while least <= longest:
        most = min(bucket_length(least), longest)
        lengths += [least, most]
        least = most + 1
    return lengths
