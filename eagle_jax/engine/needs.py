"""What the texts of a running batch need: its programs are compiled for that."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from eagle_jax.config import require
from eagle_jax.constraints.automaton import AutomatonParams
from eagle_jax.constraints.grammar import compile_grammar
from eagle_jax.decoding.logprobs import LogprobsConfig
from eagle_jax.engine.request import Request
from eagle_jax.processors import ProcessorConfig

if TYPE_CHECKING:
    from eagle_jax.engine.pair import Pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """A constraint; two that were given the same are equal.

    Attributes:
        given: See `Request.grammar`; texts that share it share a constraint.
        tables: Its automaton's, once it is compiled.
    """

    given: str
    tables: AutomatonParams | None = dataclasses.field(
        default=None, compare=False, repr=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchNeeds:
    """The kinds and sizes of all that the texts of a batch may ask for.

    Attributes:
        grammar: The constraint; `None` for none.
        is_sampled: Whether a temperature may be above 0.
        num_stops: The most stop tokens.
        room: The kinds and sizes of processors, see `make_requests`.
        num_top: The most likely tokens whose log-probabilities are told beside each
            token's own; `None` for none of all.
        has_prompt: Whether those of the prompt's tokens are told.
    """

    grammar: Grammar | None = None
    is_sampled: bool = False
    num_stops: int = 0
    room: ProcessorConfig = dataclasses.field(default_factory=ProcessorConfig)
    num_top: int | None = None
    has_prompt: bool = False

    @classmethod
    def of(
        cls,
        request: Request,
        tokenizer: Any,
        stop_tokens: Sequence[int],
        vocab_size: int,
    ) -> Self:
        """Returns what one text needs, for a target with these tokens of its own."""
        asked = request.processors(tokenizer)
        asked.check_vocabulary(vocab_size)
        given = request.grammar
        return cls(
            grammar=None if given is None else Grammar(given=given),
            is_sampled=request.temperature > 0,
            num_stops=len(request.stops(tokenizer, stop_tokens)),
            room=_room(asked),
            num_top=_num_top(request, vocab_size),
            has_prompt=request.prompt_logprobs is not None,
        )

    @property
    def logprobs(self) -> LogprobsConfig | None:
        """The log-probabilities that are told; `None` for none."""
        if self.num_top is None:
            return None
        return LogprobsConfig(num_top=self.num_top, prompt=self.has_prompt)

    def with_grammar(self, grammar: Grammar | None) -> Self:
        """Returns the same with another constraint."""
        return dataclasses.replace(self, grammar=grammar)

    def compiled(self, pair: "Pair", known: Grammar | None = None) -> Self:
        """Returns the same, whose constraint is compiled for a pair.

        Args:
            pair: What the texts are written by.
            known: A constraint that is compiled, and may be the same.

        Raises:
            InputError: If it cannot be used.
        """
        grammar = self.grammar
        if grammar is None or grammar.tables is not None:
            return self
        if grammar != known:
            given = pair.stop_tokens, pair.vocab_size, grammar.given
            tables = compile_grammar(pair.tokenizer, *given)
            known = dataclasses.replace(grammar, tables=tables)
        return self.with_grammar(known)

    def join(self, other: Self) -> Self:
        """Returns what both fit into; the constraint is the first one's."""
        return type(self)(
            grammar=self.grammar,
            is_sampled=self.is_sampled or other.is_sampled,
            num_stops=max(self.num_stops, other.num_stops),
            room=_join(self.room, other.room),
            num_top=max(
                (x for x in (self.num_top, other.num_top) if x is not None),
                default=None,
            ),
            has_prompt=self.has_prompt or other.has_prompt,
        )

    def fits(self, other: Self) -> bool:
        """Returns whether texts that need the other may enter."""
        return self.grammar == other.grammar and self.join(other) == self


def _room(asked: ProcessorConfig) -> ProcessorConfig:
    """Returns settings that stand for all of one kind and size."""
    words = asked.bad_words
    longest = _rounded(max(map(len, words), default=0))
    return ProcessorConfig(
        logit_bias=dict.fromkeys(range(_rounded(len(asked.logit_bias))), 0.0),
        repetition_penalty=1.0 if asked.repetition_penalty == 1 else 2.0,
        presence_penalty=float(asked.presence_penalty != 0),
        frequency_penalty=float(asked.frequency_penalty != 0),
        no_repeat_ngram_size=_rounded(asked.no_repeat_ngram_size),
        bad_words=[[0] * longest] * _rounded(len(words)),
        min_new_tokens=int(asked.min_new_tokens > 0),
    )


def _num_top(one: Request, vocab_size: int) -> int | None:
    """Returns for how many tokens log-probabilities are told; `None` for none."""
    wanted = [x for x in (one.logprobs, one.prompt_logprobs) if x is not None]
    for count in wanted:
        most = f"at most {vocab_size}, the tokens that the target knows"
        require(count <= vocab_size, "logprobs", count, most)
    return min(_rounded(max(wanted)), vocab_size) if wanted else None


def _join(one: ProcessorConfig, other: ProcessorConfig) -> ProcessorConfig:
    # Of two lists of zeros the longer one is the larger.
    largest: dict[str, Any] = {
        field.name: max(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(ProcessorConfig)
    }
    count = max(len(one.bad_words), len(other.bad_words))
    longest = max(map(len, [*one.bad_words, *other.bad_words]), default=0)
    largest["bad_words"] = [[0] * longest] * count
    return ProcessorConfig(**largest)


def _rounded(size: int) -> int:
    """Returns 0 or the next power of two: few sizes, so few programs."""
    return 1 << (size - 1).bit_length() if size else 0
