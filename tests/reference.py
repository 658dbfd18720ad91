"""The judge: EAGLE-2 in plain Python, written from the paper.

A node is its path: the tuple of tokens below the root, `()` for the root itself.
Whatever needs indices, buffers or padding in the package has no counterpart here.
A draft is a function from a path to the log probabilities of the next token.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

Path = tuple[int, ...]
Draft = Callable[[Path], list[float]]


class Candidate(NamedTuple):
    path: Path
    log_value: float
    log_confidence: float
    is_expanded: bool


class Step(NamedTuple):
    """One rejection step's distribution: `accepted` per sibling, `drawn` per token."""

    accepted: list[float]
    drawn: list[float]


def tied_draft(seed: int, vocab_size: int) -> Draft:
    """Log probabilities in steps of 1/4: sums are exact in float32, ties abound.

    Zero is among them, so children tie their parents, and so is minus infinity.
    They need not be normalised: the algorithm never asks for that.
    """
    steps = [0.0, 0.0, -0.25, -0.25, -0.5, -0.75, -1.0, -1.5, -2.0, -math.inf]

    def next_log_probs(path: Path) -> list[float]:
        # Seeding with a string is stable between runs, unlike hash(path).
        return random.Random(f"{seed} {path}").choices(steps, k=vocab_size)

    return next_log_probs


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


def top_children(log_probs: list[float], width: int) -> list[int]:
    """The most likely possible tokens, the lower token first among equals."""
    possible = [t for t, log_prob in enumerate(log_probs) if log_prob > -math.inf]
    return sorted(possible, key=lambda token: -log_probs[token])[:width]


def expand(
    next_log_probs: Draft, *, depth: int, width: int, rank_by: str = "value"
) -> list[Candidate]:
    """Section 4.1: only the best of the newest level are expanded."""
    candidates: list[Candidate] = []
    expanded: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(depth):
        level: list[Candidate] = []
        for path, log_value in expanded:
            log_probs = next_log_probs(path)
            for token in top_children(log_probs, width):
                confidence = log_probs[token]
                value = log_value + confidence
                level.append(Candidate((*path, token), value, confidence, False))
        # sorted() is stable: among equals the earlier one is expanded.
        best = sorted(level, key=lambda node: -_score(node, rank_by))[:width]
        expanded = [(node.path, node.log_value) for node in best]
        chosen = {node.path for node in best}
        candidates += [n._replace(is_expanded=n.path in chosen) for n in level]
    return candidates


def rerank(
    candidates: list[Candidate],
    *,
    num_nodes: int,
    rank_by: str = "value",
    use_rerank: bool = True,
) -> list[Path]:
    """Section 4.2, and the two ablations of table 3.

    Candidates come level by level, so a stable sort prefers the shallower node.
    """
    if use_rerank:
        ranked = sorted(candidates, key=lambda node: -_score(node, rank_by))
    else:
        ranked = [node for node in candidates if node.is_expanded]
    kept = {node.path for node in ranked[: num_nodes - 1]}
    return [(), *(n.path for n in candidates if prefixes(n.path) <= kept)]


def _score(node: Candidate, rank_by: str) -> float:
    return node.log_value if rank_by == "value" else node.log_confidence


def prefixes(path: Path) -> set[Path]:
    """The path and what lies above it, without the root."""
    return {path[:end] for end in range(1, len(path) + 1)}


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and every node above it; a negative parent ends the climb."""
    seen = {node}
    while parents[node] >= 0:
        node = parents[node]
        seen.add(node)
    return seen


def positions(tree: list[Path], length: int) -> list[int]:
    """The root follows `length` tokens, a child its parent."""
    return [length + len(path) for path in tree]


def visible(tree: list[Path]) -> list[list[bool]]:
    """Row sees column: what is part of the same text and not later."""
    return [[row[: len(column)] == column for column in tree] for row in tree]


def accept_greedy(
    tree: list[Path], next_token: Callable[[Path], int]
) -> tuple[Path, int]:
    """Decodes plainly for as long as the text stays inside the tree."""
    path: Path = ()
    while (*path, next_token(path)) in tree:
        path = (*path, next_token(path))
    return path, next_token(path)


def rejection_step(probs: list[float], siblings: list[int]) -> Step:
    """EAGLE-1, appendix A.2, for siblings that are not sampled.

    Try each with its probability, take a rejected one out and renormalise, draw
    from what is left at the end.
    """
    total = math.fsum(probs)
    rest = [prob / total for prob in probs]
    arrives = 1.0
    accepted = []
    for token in siblings:
        accepts = rest[token]
        accepted.append(arrives * accepts)
        arrives *= 1.0 - accepts
        rest[token] = 0.0
        mass = math.fsum(rest)
        if mass == 0.0:
            arrives = 0.0
            accepted += [0.0] * (len(siblings) - len(accepted))
            break
        rest = [prob / mass for prob in rest]
    return Step(accepted, [arrives * prob for prob in rest])


def drawn_step(probs: list[float], draft: list[float], siblings: list[int]) -> Step:
    """EAGLE-1, algorithm 1, for siblings drawn one after the other, none twice.

    Try each with the ratio of the two probabilities, take the draft's distribution
    off the target's, go on with what is left of both, draw from what is left of the
    target's at the end.
    """
    total, draft_total = math.fsum(probs), math.fsum(draft)
    rest = [prob / total for prob in probs]
    draft_rest = [prob / draft_total for prob in draft]
    arrives = 1.0
    accepted = []
    for token in siblings:
        accepts = min(1.0, rest[token] / draft_rest[token])
        accepted.append(arrives * accepts)
        arrives *= 1.0 - accepts
        left = [max(p - q, 0.0) for p, q in zip(rest, draft_rest, strict=True)]
        mass = math.fsum(left)
        if mass > 0.0:
            rest = [prob / mass for prob in left]
        draft_rest[token] = 0.0
        left_of_draft = math.fsum(draft_rest)
        if left_of_draft > 0.0:
            draft_rest = [prob / left_of_draft for prob in draft_rest]
    return Step(accepted, [arrives * prob for prob in rest])


def rejection_distribution(
    tree: list[Path], next_probs: Callable[[Path], list[float]], path: Path = ()
) -> dict[tuple[Path, int], float]:
    """Probability of every (accepted path, token after it)."""
    siblings = [p[-1] for p in tree if len(p) == len(path) + 1 and p[:-1] == path]
    step = rejection_step(next_probs(path), siblings)
    found = {(path, token): prob for token, prob in enumerate(step.drawn) if prob > 0.0}
    for token, accepted in zip(siblings, step.accepted, strict=True):
        below = rejection_distribution(tree, next_probs, (*path, token))
        found |= {outcome: accepted * prob for outcome, prob in below.items()}
    return found
