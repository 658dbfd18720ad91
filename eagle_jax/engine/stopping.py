"""Texts that end before a string, wherever it stands among tokens and rounds."""

from typing import Any

from eagle_jax.decoding.state import StopReason
from eagle_jax.engine.request import Request
from eagle_jax.engine.rows import Row
from eagle_jax.engine.text import TextStream


class StoppingText:
    """A text that ends before the first of some strings that it contains.

    It looks at every token alone, so that where it ends depends on the text, and not on
    how many tokens a round brought.

    Attributes:
        text: What may be shown: nothing that could become part of a stop string.
        new: What the last row brought that may be shown.
        num_tokens: The tokens up to the one that completed a stop string; `None` as
            long as none is there.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], settings: Request) -> None:
        """Starts after a prompt.

        Args:
            tokenizer: A `transformers` tokenizer.
            prompt: The prompt's token ids.
            settings: The settings of its request.
        """
        self.text = self.new = ""
        self.num_tokens: int | None = None
        self._tokenizer = tokenizer
        skips = settings.skip_special_tokens
        self._stream = TextStream(tokenizer, prompt, skip_special_tokens=skips)
        self._stop = settings.stop
        self._keeps_stop = settings.include_stop_str_in_output
        self._min_new_tokens = settings.min_new_tokens
        self._held_back = max(map(len, self._stop), default=1) - 1
        self._known = ""
        self._seen = 0

    def take(self, row: Row) -> Row:
        """Reads how far a text goes now; returns it up to a stop string."""
        is_last = row.stop_reason != StopReason.RUNNING
        self.new = self.update(row.generated_ids, is_last=is_last)
        if self.num_tokens is not None:
            return row.cut(self.num_tokens)
        if self._keeps_stop and row.stop_reason == StopReason.STOP_TOKEN:
            # A special token among the strings, which is not in the text.
            last = self._tokenizer.convert_ids_to_tokens(row.generated_ids[-1])
            if last in self._stop:
                self.new, self.text = self.new + last, self.text + last
        return row

    def update(self, generated: list[int], *, is_last: bool) -> str:
        """Returns what may be shown beyond the last call's.

        Args:
            generated: All token ids generated so far.
            is_last: Whether no more will come.
        """
        # Without a string to look for, a round's tokens are read at once.
        first = self._seen + 1 if self._stop else len(generated)
        for count in range(
            min(first, len(generated) + 1 - is_last), len(generated) + 1
        ):
            if self.num_tokens is None:
                self._read(generated[:count], is_last and count == len(generated))
        shown = len(self.text)
        if self.num_tokens is not None or is_last:
            self.text = self._known
        else:
            end = max(shown, len(self._known) - self._held_back)
            self.text = self._known[:end]
        return self.text[shown:]

    def _read(self, generated: list[int], is_last: bool) -> None:
        self._seen = len(generated)
        new = self._stream.update(generated, is_last=is_last)
        before = len(self._known)
        self._known += new
        if len(generated) <= self._min_new_tokens:
            return
        places = [
            (self._known.find(one, max(0, before - len(one) + 1)), one)
            for one in self._stop
        ]
        found = [(place, one) for place, one in places if place >= 0]
        if found:
            place, one = min(found)
            self.num_tokens = len(generated)
            self._known = self._known[: place + len(one) * self._keeps_stop]
