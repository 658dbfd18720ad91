"""Models that write their own cache, at one cursor for the whole batch, as targets.

Gemma, tunix and many models like them take a cache and a mask over all its slots, write
the new keys and values where the cursor stands and return the cache. Here every text
has a length of its own, and most tokens of a call are drafts that will be rejected. So
the cache gets slots more, its *tail*, behind those that hold text: the cursor always
stands there, the mask hides the tail from later calls, and `commit` moves what was
accepted from the tail to the end of each text.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.errors import InputError
from eagle_jax.interface import TargetOutput
from eagle_jax.interface.checks import check
from eagle_jax.interface.ordering import after
from eagle_jax.models.cache import append_rows


@struct.dataclass(kw_only=True)
class TailedCache:
    """The model's cache, with a tail, and what holds text in it.

    Attributes:
        layers: The model's own pytree. Its arrays have `S + tail` slots; those from
            `length` on mean nothing.
        length: `[B]` int32, the slots that hold text.
    """

    layers: Any
    length: jax.Array


@struct.dataclass(kw_only=True)
class Written:
    """The cache as a call left it: the new tokens stand behind the text's slots.

    Attributes:
        layers: The model's own pytree, which has more slots than the cache had if the
            call had more tokens than the tail.
        begin: The slot of the first new token. Static.
    """

    layers: Any
    begin: int = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWritingTarget:
    """A `Target` around a model that writes its own cache.

    The leaves of the model's cache that become larger with the slots hold a slot per
    token, along whichever axis; all others are cursors, `[B]` integers that say where
    the model writes next.

    A target is a static argument of `jax.jit`, equal to another if its functions are
    the same objects. Functions that are made anew, such as closures over a model, make
    a new target, and every program is compiled again: build it once.

    Attributes:
        apply: A function `(params, tokens [B, T], positions [B, T], layers,
            mask [B, T, slots]) -> (hidden [B, T, E], features [B, T, F], layers)` that
            runs the model. It writes the new tokens' entries at the cursor into the
            slots, all rows alike, and returns the same pytree; each token sees what its
            row of the bool mask shows, itself included, and nothing else. `hidden` is
            what `project` reads and `features` what an EAGLE head reads: the same array
            for EAGLE-1/2.
        project: A function `(params, hidden [B, n, E]) -> logits [B, n, V]`.
        empty: A function `(batch, slots) -> layers` that makes an empty cache.
        tail: The tokens that a call writes in place. A call with more, such as one that
            reads a prompt, runs on a larger copy of the cache: give it the nodes of the
            tree, or more.
    """

    apply: Callable[[Any, jax.Array, jax.Array, Any, jax.Array], tuple[Any, ...]]
    project: Callable[[Any, jax.Array], jax.Array]
    empty: Callable[[int, int], Any]
    tail: int = 64

    def init_cache(self, batch: int, capacity: int) -> TailedCache:
        """Returns an empty cache, see `Target.init_cache`.

        Raises:
            InputError: If a leaf has neither so many slots nor the form of a cursor.
        """
        slots = capacity + self.tail
        layers = self.empty(batch, slots)

        def check_leaf(path: Any, leaf: jax.Array, axis: int) -> None:
            is_integer = jnp.issubdtype(leaf.dtype, jnp.integer)
            is_cursor = is_integer and leaf.shape == (batch,)
            if not (leaf.shape[axis] == slots if axis else is_cursor):
                raise InputError(
                    f"`empty(batch={batch}, slots={slots})` returns "
                    f"{leaf.dtype}{leaf.shape} for {jax.tree_util.keystr(path)}, which "
                    f"has neither {slots} slots nor the form of a cursor, integers "
                    f"({batch},); a ring as long as a window cannot hold a tree: make "
                    "it as long as the text"
                )

        jax.tree_util.tree_map_with_path(check_leaf, layers, self._slot_axes())
        return TailedCache(layers=layers, length=jnp.zeros(batch, jnp.int32))

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: TailedCache,
    ) -> TargetOutput:
        """Runs the model over new tokens in the tail, see `Target.forward`.

        Raises:
            InputError: If the model returns another pytree than it was given.
        """
        batch, num_tokens = tokens.shape
        axes = self._slot_axes()
        sizes = jax.tree.map(lambda x, i: x.shape[i] if i else 0, cache.layers, axes)
        num_slots = max(jax.tree.leaves(sizes))
        begin, more = num_slots - self.tail, max(num_tokens - self.tail, 0)

        def prepare(leaf: jax.Array, axis: int) -> jax.Array:
            if not axis:
                return jnp.full_like(leaf, begin)
            return jnp.pad(leaf, [(0, more * (axis == i)) for i in range(leaf.ndim)])

        if mask is None:
            mask = jnp.tri(num_tokens, dtype=bool)[None]
        is_text = jnp.arange(num_slots + more) < cache.length[:, None, None]
        visible = jax.lax.dynamic_update_slice_in_dim(
            jnp.broadcast_to(is_text, (batch, num_tokens, num_slots + more)),
            jnp.broadcast_to(mask, (batch, num_tokens, num_tokens)),
            begin,
            axis=2,
        )
        layers = jax.tree.map(prepare, cache.layers, axes)
        hidden, features, written = self.apply(
            params, tokens, positions, layers, visible
        )
        check("`apply` (which writes into the layers it is given)", layers, written)
        entries = Written(layers=written, begin=begin)
        return TargetOutput(hidden=hidden, features=features, entries=entries)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits, see `Target.unembed`."""
        batch, *others, width = hidden.shape
        logits = self.project(params, hidden.reshape(batch, -1, width))
        return logits.astype(jnp.float32).reshape(batch, *others, -1)

    def commit(
        self, cache: TailedCache, entries: Written, path: jax.Array, count: jax.Array
    ) -> TailedCache:
        """Moves accepted tokens from the tail to each text's end, see `Target.commit`.

        Where the call ran on the cache's own slots, what it returned becomes the cache:
        of two versions, both alive, XLA would have to copy one in every round.
        """
        starts = after(cache.length, count)

        def write(slots: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            if not axis:
                return slots
            rows = entries.begin + path
            rows = jnp.expand_dims(rows, [i for i in range(1, new.ndim) if i != axis])
            accepted = jnp.take_along_axis(new, rows, axis=axis)
            base = new if new.shape == slots.shape else slots
            return append_rows(base, accepted, starts, axis=axis)

        layers = jax.tree.map(write, cache.layers, entries.layers, self._slot_axes())
        return TailedCache(layers=layers, length=cache.length + count)

    def _slot_axes(self) -> Any:
        """Returns the axis of the slots of each leaf, 0 for cursors."""
        fewer, more = (
            jax.eval_shape(functools.partial(self.empty, 1, slots))
            for slots in (self.tail + 1, self.tail + 2)
        )

        def axis(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> int:
            sizes = zip(a.shape, b.shape, strict=True)
            return next((i for i, (x, y) in enumerate(sizes) if x != y), 0)

        return jax.tree.map(axis, fewer, more)
