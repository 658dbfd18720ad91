"""The text that each token adds to those before it, to the byte."""

import codecs
from typing import Any

from eagle_jax.constraints.grammar import BYTE_TOKEN, byte_alphabet
from eagle_jax.engine.wording import INCOMPLETE, decode


class Spelling:
    """A text that grows token by token.

    What a token adds depends on those before it: the first may lose a space, others are
    parted by one. So it is what decoding it with them adds to their text. A part of a
    character is decoded as U+FFFD, and adds the bytes that the vocabulary says.
    """

    def __init__(
        self, tokenizer: Any, prompt: list[int], *, skips: bool = True
    ) -> None:
        """Starts after a prompt.

        Args:
            tokenizer: A `transformers` tokenizer.
            prompt: The prompt's token ids.
            skips: Whether special tokens add nothing.
        """
        self._tokenizer, self._skips, self._ids = tokenizer, skips, list(prompt)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        is_bytes = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._alphabet = byte_alphabet() if is_bytes else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # A character that the prompt began belongs to the first token.
        self._utf8.decode(b"".join(self._raw(one) or b" " for one in prompt[-4:]))
        self._begun, _ = self._utf8.getstate()
        self._utf8.reset()
        self._length = 0

    def bytes_of(self, token: int) -> bytes:
        """Returns what a token would add here."""
        # What precedes a text that begins with a character changes nothing after it.
        nothing, size = ("", INCOMPLETE), 16
        while (before := self._decode(self._ids[-size:]))[:1] in nothing:
            if size >= len(self._ids):
                break
            size *= 2
        text = self._decode([*self._ids[-size:], token])
        new = text[len(before) :] if text.startswith(before) else INCOMPLETE
        is_certain = INCOMPLETE not in before[-1:] + new
        raw = None if is_certain else self._raw(token)
        if raw is None or raw == new.encode():
            return new.encode()
        goes_on = raw[0] >> 6 == 0b10
        return self._begun * goes_on + raw

    def add(self, token: int) -> tuple[bytes, int]:
        """Goes on after a token.

        Returns:
            What it adds, and the place in the text, in characters, where that begins.
        """
        new = self.bytes_of(token)
        if new[:1] and new[0] >> 6 != 0b10:  # What was begun has become U+FFFD.
            self._length += len(self._utf8.decode(b"", final=True))
        place = self._length
        self._length += len(self._utf8.decode(new))
        self._ids.append(token)
        self._begun = b""
        return new, place

    def _raw(self, token: int) -> bytes | None:
        """Returns the bytes of a token of bytes; `None` if it is another one."""
        if not self._decode([token]):  # A special one, which is left out.
            return None
        symbol = self._tokenizer.convert_ids_to_tokens(token)
        if self._alphabet is None:
            found = BYTE_TOKEN.fullmatch(symbol)
            return found and bytes([int(found[1], 16)])
        if all(one in self._alphabet for one in symbol):
            return bytes(self._alphabet[one] for one in symbol)
        return symbol.encode()

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, self._skips)
