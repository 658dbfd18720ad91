"""Your own way to draft behind the `Drafter` protocol: what followed last.

It keeps, for every token of the text, the token that followed it the last time, and
drafts a chain: the root's follower, that one's follower, and so on. It has no weights
and needs no training.

Run it with `python examples/own_drafter.py`; docs/your-own-drafter.md explains it. The
target is the embedded one, which writes Python.
"""

import dataclasses
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import eagle_jax
from eagle_jax import assets, speculative
from eagle_jax.interface import Draws, PromptChunk, Verified
from eagle_jax.testing import ToyTarget, assert_same_tokens, assert_valid_drafter
from eagle_jax.tree import NO_PARENT, DraftTree

UNKNOWN = -1
PROMPTS = assets.TARGET.parent / "prompts.json"


class Followers(NamedTuple):
    """What the drafter remembers of each row.

    Attributes:
        table: `[B, V]` int32, the token that last followed each token, or `UNKNOWN`.
        last: `[B]` int32, the text's last token before the root; `V` at first.
    """

    table: jax.Array
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class FollowerDrafter:
    """Drafts what followed each token, the last time.

    Attributes:
        vocab_size: The number of tokens the target knows, `V`.
        depth: The length of the chain, `D`.
    """

    vocab_size: int
    depth: int = 4

    def init_state(self, batch: int, capacity: int) -> Followers:
        """Returns tables that know nothing."""
        table = jnp.full((batch, self.vocab_size), UNKNOWN, jnp.int32)
        last = jnp.full(batch, self.vocab_size, jnp.int32)
        return Followers(table=table, last=last)

    def prefill_chunk(
        self, params: Any, state: Followers, chunk: PromptChunk
    ) -> Followers:
        """Learns what follows each token of the prompt."""
        return self._read(state, chunk.tokens, chunk.count)

    def propose(
        self, params: Any, state: Followers, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, Followers]:
        """Learns that the root came last, and drafts a chain from the table."""
        rows = jnp.arange(root.shape[0])
        table = state.table.at[rows, state.last].set(root)
        tokens, exists = [root], [jnp.full(root.shape, True)]
        for _ in range(self.depth):
            follower = table[rows, tokens[-1]]
            exists.append(exists[-1] & (follower != UNKNOWN))
            tokens.append(jnp.where(exists[-1], follower, 0))
        is_node = jnp.stack(exists, axis=1)
        tree = DraftTree(
            tokens=jnp.stack(tokens, axis=1),
            parents=jnp.where(is_node, jnp.arange(-1, self.depth), NO_PARENT),
            log_values=jnp.where(is_node, 0.0, -jnp.inf),
            is_node=is_node,
        )
        return tree, state._replace(table=table)

    def advance(self, params: Any, state: Followers, verified: Verified) -> Followers:
        """Learns the accepted path: the root and the drafts that the text follows."""
        return self._read(state, verified.path_tokens, verified.count)

    def _read(self, state: Followers, tokens: jax.Array, count: jax.Array) -> Followers:
        """Learns from the first `count` (`[B]`) of some tokens (`[B, T]` int32)."""
        rows = jnp.arange(tokens.shape[0])

        def learn(place: jax.Array, state: Followers) -> Followers:
            is_real, token = place < count, tokens[:, place]
            seen = jnp.where(is_real, state.last, self.vocab_size)
            table = state.table.at[rows, seen].set(token, mode="drop")
            return Followers(table, jnp.where(is_real, token, state.last))

        # One after the other: a scatter promises no order where a token comes twice.
        return jax.lax.fori_loop(0, tokens.shape[1], learn, state)


def main(max_new_tokens: int = 96) -> None:
    """Decodes round by round, shows what each pass wrote, and compares."""
    toy = ToyTarget(vocab_size=5)
    assert_valid_drafter(FollowerDrafter(vocab_size=5), (), toy, (), vocab_size=5)
    pair = eagle_jax.load_embedded_pair()
    tokenizer, target = pair.tokenizer, pair.target
    drafter = FollowerDrafter(vocab_size=pair.vocab_size)
    decoder = eagle_jax.Decoder(target=target, drafter=drafter, acceptance="greedy")
    params = eagle_jax.Params(target=pair.params.target)
    prompt = json.loads(PROMPTS.read_text())[5]
    requests = eagle_jax.make_requests(
        [tokenizer.encode(prompt)], max_new_tokens=max_new_tokens
    )
    num_slots = eagle_jax.cache_slots(requests, decoder.depth)

    state = speculative.prefill(decoder, params, requests, num_slots=num_slots)
    written = [tokenizer.decode(state.root)]
    while state.is_running[0]:
        state, done = speculative.decode_round(decoder, params, state)
        written.append(tokenizer.decode(done.tokens[0, : done.count[0]]))
    plain = eagle_jax.autoregressive.generate(
        decoder, params, requests, num_slots=num_slots
    )
    assert_same_tokens(state.tokens, plain.tokens)
    passes, tokens = int(state.num_rounds[0]), int(plain.num_rounds[0])
    print("|".join(written))
    print(f"identical tokens, {passes} passes instead of {tokens}: ", end="")
    print(f"{tokens / passes:.2f} tokens per round")


if __name__ == "__main__":
    main()
