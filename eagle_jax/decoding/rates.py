"""Statistics of what rounds accepted: the papers' tau, and acceptance by depth."""

from collections.abc import Sequence

import numpy as np


def decoded_tokens(new_tokens: Sequence[int]) -> int:
    """Returns how many tokens of some texts rounds emitted, and not their prefills.

    Args:
        new_tokens: Each text's number of generated tokens, the prefill's included.
    """
    return sum(new_tokens) - sum(number > 0 for number in new_tokens)


def tokens_per_round(new_tokens: Sequence[int], num_rounds: int) -> float | None:
    """Returns the tokens that the rounds of some texts emitted per round (tau).

    A text's first token is the prefill's. What a round accepted after a limit or a
    stop token was never emitted: to count it would add most where texts are short, as
    the round that crosses a limit is more likely a long one.

    Args:
        new_tokens: Each text's number of generated tokens, the prefill's included.
        num_rounds: The rounds of all texts together.

    Returns:
        The mean, which is 1 for plain decoding; `None` without any round.
    """
    return decoded_tokens(new_tokens) / num_rounds if num_rounds else None


def acceptance_by_depth(
    accept_lengths: Sequence[int] | np.ndarray, depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns, by depth, the share of rounds that accept more of those that got so far.

    The papers call them n-alpha, after the `n = depth - 1` drafts that were accepted
    before. In a tree a leaf ends its round.

    >>> acceptance_by_depth([0, 1, 5, 5], depth=5)[0].tolist()
    [0.75, 0.6666666666666666, 1.0, 1.0, 1.0]

    Args:
        accept_lengths: `[R]` int, drafted tokens accepted in each round, uncut.
        depth: The number of drafted levels, after which nothing is tried.

    Returns:
        `[depth]` float64 rates, NaN where no round accepted that many, and `[depth]`
        int, how often a draft could have been; more of them if a round accepted more
        than `depth`.
    """
    rounds = np.bincount(np.asarray(accept_lengths, int), minlength=depth + 1)
    reached = rounds[::-1].cumsum()[::-1]
    return divide(reached[1:], reached[:-1]), reached[:-1]


def divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Returns the quotient of two `[X]` in float64, NaN over 0."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def repetition(texts: Sequence[Sequence[int]]) -> float:
    """Returns the share of 4-grams of texts that stood in the same text before.

    What repeats is easy to draft, so that figures of such texts flatter.

    >>> repetition([[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4]])
    0.16666666666666666

    Args:
        texts: The texts as token ids; 0 if all are shorter than four.
    """
    grams = [[tuple(text[i : i + 4]) for i in range(len(text) - 3)] for text in texts]
    total = sum(map(len, grams))
    return (total - sum(len(set(one)) for one in grams)) / max(total, 1)
