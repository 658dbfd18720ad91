"""The `Decoder`: the one static argument of every function that generates."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.core
import jax.numpy as jnp

from eagle_jax.constraints import Constraint, Guide
from eagle_jax.decoding.logprobs import LogprobsConfig
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter, Draws, Params, PromptChunk, Target, Verified
from eagle_jax.processors import Text
from eagle_jax.tree import DraftTree, root_only

AcceptanceRule = Literal["greedy", "coupled", "rejection"]
"""Names of the rules by which drafts are accepted.

`greedy` follows the target's argmax. `coupled` follows the tokens that plain
decoding draws with the same keys. `rejection` has the same distribution and other
tokens.
"""


@dataclasses.dataclass(frozen=True)
class RootDrafter:
    """Drafts nothing: a round with it is a step of plain decoding."""

    @property
    def depth(self) -> int:
        """See `Drafter.depth`."""
        return 0

    def init_state(self, batch: int, capacity: int) -> Any:
        """See `Drafter.init_state`; there is none."""
        return ()

    def prefill_chunk(self, params: Any, state: Any, chunk: PromptChunk) -> Any:
        """See `Drafter.prefill_chunk`."""
        return state

    def truncate(self, state: Any, length: jax.Array) -> Any:
        """See `Truncating`."""
        return state

    def propose(
        self, params: Any, state: Any, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, Any]:
        """See `Drafter.propose`; the tree is its root."""
        return root_only(root, 1), state

    def advance(self, params: Any, state: Any, verified: Verified) -> Any:
        """See `Drafter.advance`."""
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """A target, its drafter and the rule by which drafts are accepted.

    A decoder is hashable, so it is a legal static argument of `jax.jit`; equal ones
    share their compilations.

    Attributes:
        target: The model whose text is generated.
        drafter: The model, or anything else, that drafts; `None` for plain decoding,
            one token per round.
        acceptance: The acceptance rule; plain decoding takes the argmax under "greedy"
            and draws under the others.
        constraint: The rule that says which tokens may follow, whose parameters are
            `Params.constraint`; `None` for any.
        logprobs: The log-probabilities that are wanted beside the tokens, in
            `DecodeState.logprobs`; `None` for none.

    Raises:
        InputError: If a part is a class or has no hash, or there is no such rule.
    """

    target: Target
    drafter: Drafter | None = None
    acceptance: AcceptanceRule = "coupled"
    constraint: Constraint | None = None
    logprobs: LogprobsConfig | None = None

    def __post_init__(self) -> None:
        """Refuses parts that would fail somewhere inside a compilation."""
        for name in ("target", "drafter", "constraint"):
            given = getattr(self, name)
            if isinstance(given, type):
                raise InputError(
                    f"{name} is the class {given.__name__}; give an instance of it"
                )
            try:
                hash(given)
            except TypeError as error:
                raise InputError(
                    f"{name} is a {type(given).__name__} that has no hash ({error}); "
                    "make it a dataclass with frozen=True and hashable fields: arrays "
                    "belong into Params"
                ) from error
        rules = get_args(AcceptanceRule)
        if self.acceptance not in rules:
            known = ", ".join(repr(rule) for rule in rules)
            raise InputError(
                f"acceptance = {self.acceptance!r} is no acceptance rule; there are "
                f"{known}"
            )

    @property
    def depth(self) -> int:
        """The drafter's depth, `D`; 0 without a drafter."""
        return self.drafting.depth

    @property
    def drafting(self) -> Drafter:
        """The drafter, or what drafts nothing in its place."""
        return RootDrafter() if self.drafter is None else self.drafter

    @property
    def rule(self) -> AcceptanceRule:
        """The rule of acceptance; without a drafter there is nothing to accept."""
        if self.drafter is None and not self.is_greedy:
            return "coupled"
        return self.acceptance

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the argmax, and no sampling is compiled."""
        return self.acceptance == "greedy"

    def vocab_size(self, params: Params) -> int:
        """Returns the number of tokens that the target knows, `V`.

        A target that has an attribute `vocab_size` says it; a call of any other is
        traced, which computes nothing.
        """
        target = self.target

        def run(params: Any) -> jax.Array:
            token = jnp.zeros((1, 1), jnp.int32)
            cache = target.init_cache(1, 0)
            output = target.forward(params, token, token, None, cache)
            return target.unembed(params, output.hidden)

        known = getattr(target, "vocab_size", None)
        return known or jax.eval_shape(run, params.target).shape[-1]

    def guide(self, params: Params, state: DecodeState) -> Guide | None:
        """Returns the constraint and the processors at work, `None` without any.

        Args:
            params: The parameters, of which the constraint's are taken.
            state: The state between two rounds.
        """
        rows, text = state.rows, None
        if rows.processors is not None:
            text = Text(
                settings=rows.processors,
                tokens=state.tokens,
                length=state.lengths,
                prompt_length=rows.prompt_lengths,
                stop_tokens=rows.stop_tokens,
            )
        if self.constraint is None and text is None:
            return None
        return Guide(
            constraint=self.constraint,
            params=params.constraint,
            state=state.constraint_state,
            text=text,
            depth=self.depth,
        )

    def init_constraint(self, params: Params, batch: int) -> Any:
        """Returns the constraint's state of rows that have generated nothing."""
        if self.constraint is None:
            return ()
        return self.constraint.init_state(params.constraint, batch)

    def check(self, params: Any, requests: Requests) -> None:
        """Refuses arguments that would silently give wrong text.

        Args:
            params: The parameters of target and drafter.
            requests: The requests, `B` rows; arrays that are traced, inside somebody's
                `jax.jit`, are not looked at.

        Raises:
            InputError: If the parameters are not `Params`, or a row of a greedy
                decoder has a temperature above 0.
        """
        if not isinstance(params, Params):
            raise InputError(
                f"params is a {type(params).__name__}; give "
                "Params(target=..., drafter=...)"
            )
        temperature = requests.sampling.temperature
        if isinstance(temperature, jax.core.Tracer) or not self.is_greedy:
            return
        if (highest := float(temperature.max())) > 0:
            raise InputError(
                f"acceptance = 'greedy' takes the argmax, but temperature = "
                f"{highest:.7g}; give temperature 0, or acceptance 'coupled'"
            )
