"""The two seams: what a target and a drafter must bring, and nothing more.

Targets and drafters are frozen dataclasses that hold static settings only, so they
are hashable and legal static arguments of `jax.jit`. Parameters, caches and states
are pytrees passed in and out; they are opaque to this package, save that
every leaf of a cache or a state has the batch as axis 0, so that rows can be inserted
and taken out. No leaf has a name that anything here reads: lengths, too, are the
cache's own.

Axes are those of `eagle_jax.tree`. `F` is the width of what drafters read of the
target: its last hidden state for EAGLE-1/2 (`F = E`), the residual stream before
three of its layers for EAGLE-3.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.constraints import Guide
from eagle_jax.sampling import SamplingParams
from eagle_jax.tree import DraftTree

Cache = Any
"""A target's own cache pytree; it holds how much of each row is confirmed."""

Entries = Any
"""The keys and values of one call's tokens, an opaque pytree."""


@struct.dataclass(kw_only=True)
class TargetOutput:
    """The result of one call of a target.

    Attributes:
        hidden: `[B, T, E]`, the hidden states that `unembed` turns into logits.
        features: `[B, T, F]`, the features that drafters read.
        entries: The new keys and values, *beside* the cache; see `Target.commit`.
    """

    hidden: jax.Array
    features: jax.Array
    entries: Entries


@struct.dataclass(kw_only=True)
class Params:
    """The parameters of a pair.

    Attributes:
        target: The target's pytree.
        drafter: The drafter's pytree; `()` for a drafter without weights.
        constraint: The constraint's pytree; `()` without a constraint.
    """

    target: Any
    drafter: Any = ()
    constraint: Any = ()


@struct.dataclass(kw_only=True)
class PromptChunk:
    """The next tokens of the prompts, which the target has just read.

    Chunks may differ in their size, `C`, and may end before the padding does.

    Attributes:
        prompts: `[B, T]` int32, the whole prompts, padded at the end.
        lengths: `[B]` int32, real tokens per prompt, at least 1.
        begin: `[]` int32, the place of the chunk's first token.
        features: `[B, C, F]`, the target's features at the chunk's tokens; undefined
            after a prompt's end.
    """

    prompts: jax.Array
    lengths: jax.Array
    begin: jax.Array
    features: jax.Array

    @property
    def tokens(self) -> jax.Array:
        """`[B, C]` int32, the chunk's tokens."""
        size = self.features.shape[1]
        return jax.lax.dynamic_slice_in_dim(self.prompts, self.begin, size, axis=1)

    @property
    def count(self) -> jax.Array:
        """`[B]` int32, how many of the chunk's tokens are real."""
        return jnp.clip(self.lengths - self.begin, 0, self.features.shape[1])

    def newest(self, values: jax.Array, before: jax.Array | None) -> jax.Array:
        """Returns `[B, ...]`, what belongs to each prompt's newest token.

        Args:
            values: `[B, C, ...]`, what belongs to the chunk's tokens.
            before: `[B, ...]`, what to return for prompts that ended before the chunk;
                `None` if it is the only one.
        """
        rest = (1,) * (values.ndim - 2)
        count = self.count.reshape(-1, *rest)
        last = jnp.maximum(count - 1, 0)[:, None]
        newest = jnp.take_along_axis(values, last, axis=1)[:, 0]
        if before is None:
            return newest
        return jnp.where(count > 0, newest.astype(before.dtype), before)


@struct.dataclass(kw_only=True)
class Draws:
    """What is known, before a round, of how its tokens will be drawn.

    Attributes:
        sampling: The settings of sampling, `[B]` fields.
        noise: `[B, P, V]` float32, or `None` where the target's tokens are drawn with
            none that is known before (all rules but "coupled"). After a node at depth
            `d` the target takes the argmax of its own processed logits plus row `d`: a
            drafter that adds the same row to *its* processed logits and takes the
            largest sums drafts what the target will draw, wherever the two
            distributions are near (`eagle_jax.sampling`). Zero in rows of
            temperature 0.
        keys: `[B]` typed PRNG keys, of this round and of drafting alone: for drafts
            that are themselves drawn, and tested by rejection.
        guide: The constraint and the processors of the text, `None` without any. Drafts
            that they forbid are dropped; a drafter that has a distribution spends its
            nodes better by processing its logits likewise.
    """

    sampling: SamplingParams
    noise: jax.Array | None
    keys: jax.Array
    guide: Guide | None = None


@struct.dataclass(kw_only=True)
class Verified:
    """All that the target said in one round; XLA drops the arrays that nobody reads.

    Attributes:
        tree: The verified tree, `[B, N]` fields.
        logits: `[B, N, V]` float32, the target's after *every* node.
        features: `[B, N, F]`, the target's at every node.
        path: `[B, P]` int32, the accepted nodes, root first.
        count: `[B]` int32, how many of `path` are confirmed now; 0 in rows that are
            finished.
    """

    tree: DraftTree
    logits: jax.Array
    features: jax.Array
    path: jax.Array
    count: jax.Array

    @property
    def path_tokens(self) -> jax.Array:
        """`[B, P]` int32, the path's tokens, root first; undefined past `count`."""
        return jnp.take_along_axis(self.tree.tokens, self.path, axis=1)

    @property
    def path_features(self) -> jax.Array:
        """`[B, P, F]`, the target's features at the tokens of `path_tokens`."""
        return jnp.take_along_axis(self.features, self.path[..., None], axis=1)


class Target(Protocol):
    """The model whose text is generated.

    One that has an attribute `vocab_size`, the number of tokens it knows, `V`, is not
    traced to find it.
    """

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache.

        Args:
            batch: The number of rows, `B`. Static.
            capacity: The number of slots per row, `S`. Static; 0 is legal (a prefill
                reads no cache). A larger cache may have longer axes; the content of a
                smaller one stands at their beginning.
        """
        ...

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: Cache,
    ) -> TargetOutput:
        """Runs the model over new tokens; the cache is read, never written.

        Every token sees what was committed to its row and, among the new tokens, those
        its row of the mask names.

        Args:
            params: The target's parameters.
            tokens: `[B, T]` int32, the new tokens.
            positions: `[B, T]` int32, their absolute positions.
            mask: `[B, T, T]` bool, true where the second axis' token sees the
                third's; every token sees itself. `None` for causal.
            cache: The cache of the confirmed text.
        """
        ...

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits `[..., V]` of hidden states `[..., E]`."""
        ...

    def commit(
        self, cache: Cache, entries: Entries, path: jax.Array, count: jax.Array
    ) -> Cache:
        """Appends accepted tokens to each row of the cache.

        Args:
            cache: The cache, with room for `P` more slots in every row.
            entries: The keys and values that a call over `T` tokens returned; they may
                be a whole cache, which becomes the new one (`eagle_jax.adapters`).
            path: `[B, P]` int32, indices into those `T` tokens.
            count: `[B]` int32, how many of `path` to keep; may be 0.
        """
        ...


@runtime_checkable
class Truncating(Protocol):
    """A target, a drafter or a draft model that can go back to a text's beginning.

    No loop needs it. With it `slots.reuse_prefill` reads only what is new of a prompt
    that begins like a text that is there.
    """

    def truncate(self, state: Any, length: jax.Array) -> Any:
        """Returns the cache or state as it was when `length` tokens were read.

        Args:
            state: The cache or state of rows that have read more, and the same token
                after these.
            length: `[B]` int32, the number of tokens.
        """
        ...


@runtime_checkable
class DraftingTarget(Target, Protocol):
    """A target that can also run beside the drafts of earlier calls.

    No loop needs it. `eagle_jax.drafting.SmallModel` does with it what it does with any
    target, in fewer operations: each level of a tree is run once.
    """

    def forward_after(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        earlier: Entries | None,
    ) -> TargetOutput:
        """Runs the model over new tokens that see drafts of earlier calls.

        Args:
            params: The target's parameters.
            tokens: `[B, T]` int32, the new tokens.
            positions: `[B, T]` int32, their absolute positions.
            mask: `[B, T, U]` bool, true where a new token sees one of the drafts run so
                far, oldest first, the `T` new ones at the end.
            cache: The cache of the confirmed text.
            earlier: The entries of the call before, which hold the other `U - T`
                tokens; `None` where there was none, and `U = T`.

        Returns:
            The result for the `T` tokens, with the entries of all `U`.
        """
        ...


class Drafter(Protocol):
    """A model, or anything else, that proposes a tree."""

    @property
    def depth(self) -> int:
        """The depth of the deepest node that may be proposed, `D`. Static."""
        ...

    def init_state(self, batch: int, capacity: int) -> Any:
        """Returns an empty state for rows of at most `capacity` tokens.

        A larger state may have longer axes, as in `Target.init_cache`.
        """
        ...

    def prefill_chunk(self, params: Any, state: Any, chunk: PromptChunk) -> Any:
        """Reads a chunk of the prompts and returns the new state.

        It is called for every chunk in turn; a short prompt is one.

        Args:
            params: The drafter's parameters.
            state: The state in which all chunks before are read.
            chunk: The chunk.
        """
        ...

    def propose(
        self, params: Any, state: Any, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, Any]:
        """Returns a batched tree (`[B, N]` fields) and the new state.

        A drafter that draws children must say from which distribution, in
        `DraftTree.draft_logits`, and must not let the tree's shape depend on them.

        Args:
            params: The drafter's parameters.
            state: The state, which knows the text up to, not including, the root.
            root: `[B]` int32, the last emitted tokens.
            draws: The settings, noise and keys of the round's draws, for drafters that
                have a distribution; others do not read them.
        """
        ...

    def advance(self, params: Any, state: Any, verified: Verified) -> Any:
        """Takes in what the target said and returns the new state.

        Args:
            params: The drafter's parameters.
            state: The state that `propose` returned.
            verified: The target's output for the whole tree, and the accepted path.
        """
        ...
