"""What the author of a target runs once: does it keep the protocol?

The judge is one causal call over a whole text, without a cache. The target is then
called as the decoding loop calls it: over small trees and a large one with padding,
with rows of unequal lengths, short and long, after commits of paths with gaps, and with
a cache that grows.
"""

import copy
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import fill
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import RecyclingDrafter
from eagle_jax.errors import InputError
from eagle_jax.interface import Cache, Params, Target
from eagle_jax.testing.asserts import check
from eagle_jax.testing.calls import LONGEST, ROWS, Call, Caller, Commit, rolled
from eagle_jax.testing.programs import every_line, find_copies
from eagle_jax.tree import chain

# The parents of the nodes of each row's tree, and a path of it. Siblings share
# positions, paths have gaps, and no row's are another's.
_TREES = ((-1, 0, 0, 1, 2, 2), (-1, 0, 0, 0, 1, 3), (-1, 0, 1, 1, 3, 3))
_PATHS = ((0, 2, 5), (0, 3, 5), (0, 1, 3))

# Six chains below the root, level by level, with padding between the levels.
_LARGE_TREE = [-1, *(max(node - 7, 0) if node % 7 else -1 for node in range(1, 80))]
_LARGE_PATHS = np.array([[0, *range(row + 1, 78, 7)] for row in range(ROWS)])
_LONGEST_TEXT = 192


def assert_valid_target(
    target: Target,
    params: Any,
    vocab_size: int,
    *,
    atol: float = 1e-3,
    num_positions: int = _LONGEST_TEXT,
) -> None:
    """Checks all that the decoding loop takes for granted about a target.

    It compiles about fifteen calls of three rows, of 80 tokens over 160 at most. Give
    it a small model, whose weights are trained or at least not tiny: where every text
    has the same logits, no mistake can be seen.

    Args:
        target: The target.
        params: Its parameters.
        vocab_size: The number of tokens it knows, `V`, at least 3.
        atol: The largest error of a logit or a feature, as a part of the largest
            absolute value beside it, if that is above 1. The default is for float32;
            products of the highest precision are asked for.
        num_positions: The most tokens that a text of this model may have, at least 48.
            Those above 192 are not used.

    Raises:
        AssertionError: If the target breaks a rule; names the method and the likely
            reason.
    """
    try:
        _check_static(target, params)
        with jax.default_matmul_precision("highest"):
            caller = Caller(target, params, vocab_size, atol)
            _check_caches(target)
            _check_reading(caller)
            _check_rounds(caller)
            _check_large_calls(caller, min(num_positions, _LONGEST_TEXT))
        _check_copies(target, params, vocab_size)
    except InputError as error:
        raise AssertionError(str(error)) from error


def _check_static(target: Target, params: Any) -> None:
    """Checks shapes and types, and that equal targets share their compilations."""
    decoder, weights = Decoder(target=target), Params(target=params)
    requests = make_requests([[0]] * ROWS, max_new_tokens=1)
    # With two numbers of rows, no other axis is as long by chance.
    for rows in (slice(None), slice(1)):
        some = jax.tree.map(lambda leaf, rows=rows: leaf[rows], requests)
        run = functools.partial(speculative.prefill, decoder, num_slots=LONGEST)
        jax.eval_shape(run, weights, some)
    twin = copy.copy(target)
    check(
        twin == target and hash(twin) == hash(target),
        f"a copy of {type(target).__name__} is not equal to it, and would be compiled "
        "anew; make it a dataclass with frozen=True",
    )


def _check_caches(target: Target) -> None:
    """Checks the leaves of caches of several sizes."""
    name = type(target).__name__
    init = functools.partial(target.init_cache, ROWS)
    sizes = (0, LONGEST, 2 * LONGEST)
    shapes = [jax.eval_shape(functools.partial(init, size)) for size in sizes]
    for smaller, larger in itertools.pairwise(shapes):
        check(
            jax.tree.structure(smaller) == jax.tree.structure(larger),
            f"{name}.init_cache returns another pytree for another capacity: "
            f"{jax.tree.structure(smaller)} and {jax.tree.structure(larger)}",
        )
        old = jax.tree_util.tree_leaves_with_path(smaller)
        for (path, leaf), more in zip(old, jax.tree.leaves(larger), strict=True):
            check(
                leaf.dtype == more.dtype
                and len(leaf.shape) == len(more.shape)
                and all(x <= y for x, y in zip(leaf.shape, more.shape, strict=True)),
                f"{name}.init_cache: {jax.tree_util.keystr(path)} has shape "
                f"{leaf.shape} {leaf.dtype}, which does not fit into the "
                f"{more.shape} {more.dtype} of a larger capacity",
            )


def _check_reading(caller: Caller) -> None:
    """Checks the judge: a text that is read causally, by one call without a cache."""
    changed, call = 3, _new_tokens(caller, [[]] * ROWS, _chains(LONGEST))
    text = call.tokens[0].tolist()
    other = call.with_token(0, changed, caller.vocab_size).tokens[0].tolist()
    logits, _ = caller.read([text, other])
    name = f"{caller.name}.forward with mask None and a cache without slots"
    check(bool(np.isfinite(logits[:2]).all()), f"{name} leads to logits that are NaN")
    differs = caller.differs(logits[1], logits[0])
    check(
        not differs[:changed].any(),
        f"{name}: the logits of a token depend on a token after it; None is causal",
    )
    check(
        bool(differs[changed]),
        f"{name}: the logits of a token do not depend on itself; it is blind to "
        "itself, or the weights are so small that all logits are nearly equal",
    )


def _check_rounds(caller: Caller) -> None:
    """Reads prompts, verifies and commits trees, reads on, and lets the cache grow."""
    nothing = caller.target.init_cache(ROWS, 0)
    cache = caller.target.init_cache(ROWS, LONGEST)
    call = _new_tokens(caller, [[]] * ROWS, _chains(5))
    _check_call(caller, call, nothing, None)
    paths = np.tile(np.arange(5), (ROWS, 1))
    done = Commit(call, nothing, cache, paths, np.array([4, 2, 5]))
    for turn, count in enumerate(([2, 0, 3], [3, 1, 0])):
        cache = done.run(caller)
        trees = np.roll(_TREES, turn, axis=0)
        call = _new_tokens(caller, done.texts, trees.tolist())
        _check_call(caller, call, cache, done)
        paths = np.roll(_PATHS, turn, axis=0)
        done = Commit(call, cache, cache, paths, np.array(count))
    cache = done.run(caller)
    for length in (3, 1):
        call = _new_tokens(caller, done.texts, _chains(length))
        _check_call(caller, call, cache, done)
    larger = caller.target.init_cache(ROWS, 2 * LONGEST)
    grown = jax.tree.map(fill, larger, cache)
    wrong = caller.differs(call.run(caller, grown)[0], call.run(caller, cache)[0])
    check(
        not wrong.any(),
        f"{caller.name}.init_cache: a larger cache, filled from the beginning of each "
        "axis with a smaller one, is not read as the smaller one is; slots must stand "
        "in the order of the text, and what is not text behind them",
    )


def _check_large_calls(caller: Caller, longest: int) -> None:
    """Verifies a large tree over short and long texts, before and after a commit."""
    random = np.random.default_rng(seed=0)
    nothing = caller.target.init_cache(ROWS, 0)
    empty = caller.target.init_cache(ROWS, longest + _LARGE_PATHS.shape[1])
    every = np.tile(np.arange(longest), (ROWS, 1))
    # The short texts are no longer than those that were read before.
    for lengths in ([4, 1, 3], [longest - 25 - 8 * row for row in range(ROWS)]):
        prompts = random.integers(caller.vocab_size, size=every.shape)
        logits, _ = caller.read(prompts.tolist(), longest)
        check(
            bool(np.isfinite(logits[:ROWS]).all()),
            f"{caller.name}.forward with mask None leads to logits that are NaN in a "
            f"text of {longest} tokens; give `num_positions` if the model has fewer",
        )
        call = Call(texts=[[]] * ROWS, tokens=prompts, parents=_chains(longest))
        done = Commit(call, nothing, empty, every, np.array(lengths))
        for _ in range(2):
            cache = done.run(caller)
            tokens = random.integers(caller.vocab_size, size=(ROWS, len(_LARGE_TREE)))
            call = Call(
                texts=done.texts,
                tokens=tokens,
                parents=[_LARGE_TREE] * ROWS,
                longest=longest,
            )
            _check_call(caller, call, cache, done)
            done = Commit(call, cache, cache, _LARGE_PATHS, np.array([12, 9, 11]))


def _check_call(caller: Caller, call: Call, cache: Cache, last: Commit | None) -> None:
    """Compares every token's logits and features with those of its path, read alone.

    The cache is from the last commit, `None` where it has no slots.
    """
    logits, output = call.run(caller, cache)
    expected, features = call.judged(caller)
    kind = "mask None" if call.is_causal else "a tree's mask"
    over = "no cache" if last is None else "a filled cache"
    name = f"{caller.name}.forward with {kind} and {over}"
    if (wrong := caller.differs(logits, expected) & call.is_node).any():
        row, node = map(int, np.argwhere(wrong)[0])
        error = np.abs(np.asarray(logits)[row, node] - expected[row, node]).max()
        reason = _reason(caller, call, cache, row, node)
        if reason is None and last is not None:
            reason = _reason_of_commit(caller, call, last, wrong, row)
        reason = reason or "a call of one row and one of many disagree"
        raise AssertionError(
            f"{name}: {reason}. The logits of node {node} of row {row} are not those "
            f"of its path read causally; they differ by {error:.3g}"
        )
    wrong = caller.differs(output.features, features) & call.is_node
    check(
        not wrong.any(),
        f"{name}: the features of node and row {np.argwhere(wrong)[:1, ::-1].tolist()} "
        "are not those of its path read causally, though its logits are",
    )


def _reason(
    caller: Caller, call: Call, cache: Cache, row: int, node: int
) -> str | None:
    """Returns why a node's logits are wrong, from what they depend on."""
    found, _ = call.run(caller, cache)
    expected, _ = call.judged(caller)

    def changes(logits: jax.Array) -> bool:
        return bool(caller.differs(logits, found)[row, node])

    def depends_on(other: int) -> bool:
        changed = call.with_token(row, other, caller.vocab_size)
        return changes(changed.run(caller, cache)[0])

    without, _ = call.without_padding().run(caller, cache)
    if not caller.differs(without, expected)[row, node]:
        return (
            f"a node of padding, which sees the text and itself, spoils node {node}, "
            "which does not see it; if it is NaN, so is its product with a weight of 0"
        )
    path = call.path(row, node)
    for other in range(call.tokens.shape[1]):
        if other not in path and depends_on(other):
            parents = call.parents[row]
            kin = "its sibling" if parents[node] == parents[other] else "node"
            return f"it ignores the mask: node {node} sees {kin} {other}"
    if not depends_on(node):
        return f"node {node} is blind to itself; every token sees itself"
    empty = jax.tree.map(jnp.zeros_like, cache)
    if len(call.texts[row]) and not changes(call.run(caller, empty)[0]):
        return "it ignores the cache"
    for other in path[:-1]:
        if not depends_on(other):
            return f"node {node} does not see its ancestor {other}"
    if not changes(call.run(caller, cache, shift=1)[0]):
        return (
            "it ignores the positions it is given; nodes of one depth share theirs, "
            "which is the row's length and the depth"
        )
    if row and _is_right_if_first(caller, call, rolled(cache, row), row):
        return "it reads every row's cache as row 0's, as with row 0's length"
    return None


def _reason_of_commit(
    caller: Caller, call: Call, last: Commit, wrong: np.ndarray, row: int
) -> str:
    """Returns what is wrong with a commit, from the rows that it went wrong in."""
    commit = f"{caller.name}.commit"
    if row and _is_right_if_first(caller, call, last.run(caller, row), row):
        return f"{commit} takes row 0's length or row 0's path for all rows"
    if call.tokens.shape[1] > LONGEST:
        return _reason_of_size(caller, call, last, wrong)
    in_rows = np.any(wrong, axis=1)
    is_cut = last.count < last.path.shape[1]
    if not in_rows[~is_cut].any():
        return (
            f"slots behind a row's text are seen; {commit} must add `count` to the "
            "length, not P, and forward must see slots below the length alone"
        )
    steps = np.arange(last.path.shape[1])
    has_gap = ((last.path != steps) & (steps < last.count[:, None])).any(axis=1)
    if not in_rows[~has_gap].any():
        return f"{commit} ignores the path: it must write the rows that it names"
    return (
        "the cache is not read as it was written: every slot below a row's length must "
        "be seen and none from there on, or the last commit went wrong"
    )


def _reason_of_size(caller: Caller, call: Call, last: Commit, wrong: np.ndarray) -> str:
    """Returns what is wrong with a large call, where small ones are right."""
    if not wrong[:, 0].any():
        return (
            "a window is to be counted from each node's own position, not from the "
            "root's, in the cache and among the nodes"
        )
    num_tokens = max(map(len, call.texts))
    if num_tokens <= LONGEST:
        count = last.count.max()
        return f"{caller.name}.commit does not write all of `count` rows, here {count}"
    return (
        f"a text of {num_tokens} tokens is not read whole: every slot below a row's "
        "length must be seen, save by layers with a window those before it"
    )


def _is_right_if_first(caller: Caller, call: Call, cache: Cache, row: int) -> bool:
    """Returns whether a wrong row is right in the place of row 0."""
    first = call.rolled(row)
    expected, _ = first.judged(caller)
    logits, _ = first.run(caller, cache)
    return not caller.differs(logits, expected)[0].any()


def _chains(length: int) -> list[list[int]]:
    return [list(range(-1, length - 1))] * ROWS


def _new_tokens(
    caller: Caller, texts: list[list[int]], parents: Sequence[Sequence[int]]
) -> Call:
    """Returns a call over tokens that differ from row to row and among siblings."""
    starts = [[len(text) + 2 * row + 1] for row, text in enumerate(texts)]
    tokens = (np.array(starts) + np.arange(len(parents[0]))) % caller.vocab_size
    return Call(texts=texts, tokens=tokens, parents=parents)


def _check_copies(target: Target, params: Any, vocab_size: int) -> None:
    """Compiles one round, and looks for copies of a whole array of the cache."""
    num_slots = 37  # Nothing else has this size.
    # Its state has no axis of slots, which could be taken for the cache's.
    drafter = RecyclingDrafter(vocab_size=vocab_size, tree=chain(2))
    decoder = Decoder(target=target, drafter=drafter)
    requests = make_requests([[1, 2]] * ROWS, max_new_tokens=2, prompt_bucket=2)
    weights = Params(target=params)
    state = jax.eval_shape(
        lambda *given: speculative.prefill(decoder, *given, num_slots=num_slots),
        weights,
        requests,
    )
    program = speculative.decode_round.lower(decoder, weights, state).compile()
    lines = every_line(program.as_text() or "")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.target_cache):
        if num_slots not in leaf.shape:
            continue
        # Attention may read a cache with its axes in another order.
        sizes = f"[{','.join(map(str, leaf.shape))}]"
        found = [line for line in find_copies(lines, leaf.shape) if sizes in line]
        copies = [line for line in found if re.search(r" copy(-start)?\(", line)]
        check(
            not copies,
            f"{type(target).__name__}.commit: a round copies all of the cache's "
            f"{jax.tree_util.keystr(path)} {sizes}, {len(copies)} times; write "
            "accepted rows with eagle_jax.append_rows, into what forward wrote if it "
            "writes a cache, and keep one array per layer",
        )
