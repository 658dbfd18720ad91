"""Questions by the target itself: it writes the user's turn of its own chat template.

An instruction model was trained on conversations, so after the opening of a user's turn
it goes on as a user would (Magpie, Xu et al. 2024, arXiv 2406.08464, section 2). What
the system says before steers the field.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle_jax.engine.wording import apply_chat_template
from eagle_jax.errors import InputError

_MARK = "\u2997question\u2998"  # Stands where the user's text begins.
_LEAST_WORDS, _MOST_WORDS = 3, 1500
# Questions that begin with the same words are one question.
_SAME_WORDS = 12
# Of the sequences of four words so many are different ones, or it is a loop.
_LEAST_SHARE = 0.6
_WORD = re.compile(r"\w+")


def read_systems(path: Path) -> list[str]:
    """Reads what the system says, a line each; an empty line leaves it to the template.

    Raises:
        InputError: If the file cannot be read or is empty.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not lines:
        raise InputError(f"{path} is empty; write what the system says, a line each")
    return [line.strip() for line in lines]


def opening(tokenizer: Any, system: str) -> list[int]:
    """Returns the ids of a chat template up to where the user's text begins.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        system: What the system says; nothing for what the template says itself.

    Raises:
        InputError: If the template changes what a user says.
    """
    messages = [{"role": "user", "content": _MARK}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text, _ = apply_chat_template(tokenizer, messages, add_generation_prompt=False)
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise InputError(
            "the chat template changes what a user says, so the target cannot go on "
            "as one; give `data` with questions"
        )
    return list(tokenizer(before, add_special_tokens=False).input_ids)


class Questions:
    """The questions that are kept: none too short or long, a loop, or there already."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """Takes the questions of an earlier run."""
        self._begun = {_beginning(text) for text in known}

    def keep(self, text: str) -> bool:
        """Returns whether a question is kept, and remembers it if so."""
        words = _WORD.findall(text)
        fours = [*zip(words, words[1:], words[2:], words[3:], strict=False)]
        is_loop = len({*fours}) < _LEAST_SHARE * len(fours)
        begun = _beginning(text)
        is_sized = _LEAST_WORDS <= len(words) <= _MOST_WORDS
        if not is_sized or is_loop or begun in self._begun:
            return False
        self._begun.add(begun)
        return True


def _beginning(text: str) -> tuple[str, ...]:
    return tuple(word.casefold() for word in _WORD.findall(text)[:_SAME_WORDS])
