"""What the server counts, in Prometheus' text format."""

import bisect
import collections
from collections.abc import Mapping
from typing import Any

from eagle_jax.engine import Generation

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OUTCOMES = ("done", "refused", "cancelled", "failed")


class Metrics:
    """Counts of requests and of texts that have ended; the event loop alone counts."""

    def __init__(self) -> None:
        """Starts at zero."""
        self._requests = collections.Counter[str](dict.fromkeys(_OUTCOMES, 0))
        self._texts = self._prompt_tokens = self._tokens = self._rounds = 0
        self._accepted = collections.Counter[int]()
        self._trees = collections.Counter[str]()
        self._first_seconds = 0.0
        self._first_counts = [0] * (len(_SECONDS) + 1)

    def count_request(self, outcome: str) -> None:
        """Counts a request whose answer has ended."""
        self._requests[outcome] += 1

    def count_first_token(self, seconds: float) -> None:
        """Counts how long a streamed text let its reader wait for its first token."""
        self._first_seconds += seconds
        self._first_counts[bisect.bisect_left(_SECONDS, seconds)] += 1

    def count_text(self, generation: Generation) -> None:
        """Counts a text that has ended."""
        self._texts += 1
        self._prompt_tokens += len(generation.prompt_ids)
        self._tokens += len(generation.token_ids)
        self._rounds += len(generation.accept_lengths)
        self._trees.update(generation.trees)
        for accepted in generation.accept_lengths:
            self._accepted.update(range(1, accepted + 1))

    def render(self, *, waiting: int, running: int) -> str:
        """Returns all of it, with the texts that wait and those being written."""
        rate = (self._tokens - self._texts) / max(1, self._rounds)
        metrics = (
            ("requests_total", "counter", _by("outcome", self._requests)),
            ("waiting", "gauge", {"": waiting}),
            ("running", "gauge", {"": running}),
            ("prompt_tokens_total", "counter", {"": self._prompt_tokens}),
            ("generated_tokens_total", "counter", {"": self._tokens}),
            ("rounds_total", "counter", {"": self._rounds}),
            ("tree_rounds_total", "counter", _by("tree", self._trees)),
            ("tokens_per_round", "gauge", {"": rate}),
            ("accepted_total", "counter", _by("depth", self._accepted)),
            ("time_to_first_token_seconds", "histogram", self._first_tokens()),
        )
        return "".join(_metric(*one) for one in metrics)

    def _first_tokens(self) -> dict[str, float]:
        values, below = dict[str, float](), 0
        for bound, count in zip((*_SECONDS, "+Inf"), self._first_counts, strict=True):
            below += count
            values[f'_bucket{{le="{bound}"}}'] = below
        return values | {"_sum": self._first_seconds, "_count": below}


def _metric(name: str, kind: str, values: Mapping[str, float]) -> str:
    name = f"eagle_jax_{name}"
    lines = [f"{name}{label} {value}\n" for label, value in values.items()]
    return f"# TYPE {name} {kind}\n" + "".join(lines)


def _by(label: str, counts: Mapping[Any, int]) -> dict[str, float]:
    return {f'{{{label}="{key}"}}': counts[key] for key in sorted(counts)}
