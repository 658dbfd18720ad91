"""Requests with penalties and bans, and what a plain Python judge makes of logits."""

from typing import Any

import numpy as np

from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.processors import ProcessorConfig
from eagle_jax.testing import ToyTarget
from eagle_jax.tree import from_paths

VOCABULARY, STOP = 12, 11
TARGET = ToyTarget(vocab_size=VOCABULARY, sharpness=1.0)
TOY: dict[str, Any] = {"vocab_size": VOCABULARY, "sharpness": 1.0, "seed": 0}
KNOWN = (0, 1, 2, 4, 6, 7, 9, 11)
BUSH = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
EACH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logit_bias": {"logit_bias": {3: 2.0, 5: -3.5}},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.5},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words": [[4], [1, 2], [7, 8, 9], [3, 3]]},
    "min_new_tokens": {"min_new_tokens": 12},
}
ALL = {name: value for fields in EACH.values() for name, value in fields.items()}
ROOM = ProcessorConfig(**ALL)


def configs_of(names: list[str]) -> list[ProcessorConfig]:
    return [ProcessorConfig(**(ALL if name == "all" else EACH[name])) for name in names]


def judge(
    config: ProcessorConfig, prompt: list[int], output: list[int], logits: np.ndarray
) -> np.ndarray:
    """What the settings say, token by token."""
    text, found = prompt + output, logits.astype(np.float32)
    for token, bias in dict(config.logit_bias).items():
        found[token] += np.float32(bias)
    for token in set(text):
        factor = np.float32(config.repetition_penalty)
        found[token] *= 1 / factor if found[token] > 0 else factor
    for token in set(output):
        found[token] -= config.presence_penalty
        found[token] -= config.frequency_penalty * output.count(token)
    size = config.no_repeat_ngram_size
    for end in range(max(size, 1), len(text) + 1):
        gram = text[end - size : end]
        if size and gram[:-1] == text[len(text) - size + 1 :]:
            found[gram[-1]] = -np.inf
    for word in map(list, config.bad_words):
        if word[:-1] == text[len(text) - len(word) + 1 :]:
            found[word[-1]] = -np.inf
    if len(output) < config.min_new_tokens:
        found[STOP] = -np.inf
    return found


def requests_of(
    configs: list[ProcessorConfig], room: ProcessorConfig | None = None, **changes: Any
) -> Requests:
    rows = len(configs)
    asked: dict[str, Any] = {
        "prompts": [[1, 3], [4, 4], [0, 3, 1], [5, 2]] * rows,
        "max_new_tokens": [40, 17, 30, 29] * rows,
        "temperature": [0.0, 1.0, 0.7, 0.0] * rows,
        "top_k": [0, 0, 5, 0] * rows,
        "seeds": list(range(rows)),
    }
    asked = {name: values[:rows] for name, values in asked.items()}
    more: dict[str, Any] = {"stop_tokens": [STOP], "vocab_size": VOCABULARY}
    asked |= more | changes
    return make_requests(**asked, processors=configs, processor_room=room)
