"""From pieces of texts to the answers that OpenAI's clients read."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from eagle_jax.engine import Piece, TokenLogprob
from eagle_jax.engine.spelling import Spelling
from eagle_jax.serve.errors import error_body
from eagle_jax.serve.requests import TextRequest

DONE = "data: [DONE]\n\n"

# Clients know no "constraint". Where it allows no token the text is cut short, too: who
# reads it as JSON must not take it for a whole one.
_FINISH_REASONS = {"constraint": "length"}


class Answer:
    """The answer to one request of `/v1/completions`.

    `ChatAnswer` is that of `/v1/chat/completions`.
    """

    prefix, whole_kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: TextRequest, model: str) -> None:
        """Takes the request, and the model's name."""
        self._request = request
        self._shared = {
            "id": f"{self.prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
        }
        self._spellings = {
            text.index: Spelling(
                request.tokenizer,
                text.prompt_ids,
                skips=text.request.skip_special_tokens,
            )
            for text in request.texts
            if text.request.logprobs is not None
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the answer with all texts, each of which came in one piece."""
        choices = [self._choice(piece) | self._said(piece.text) for piece in pieces]
        made = sum(len(piece.token_ids) for piece in pieces)
        kind = {"object": self.whole_kind, "choices": choices}
        return self._shared | kind | {"usage": self._usage(made)}

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Yields the answer as server-sent events; an error is the last of them."""
        made = 0
        try:
            for choice in self._first():
                yield self._event([choice], self._so_far(0))
            async for piece in pieces:
                made += len(piece.token_ids)
                if piece.text or piece.logprobs or piece.finish_reason is not None:
                    choice = self._choice(piece) | self._added(piece.text)
                    yield self._event([choice], self._so_far(made))
        except Exception as error:
            yield _event(error_body(error))
            return
        if self._request.with_usage:
            yield self._event([], self._usage(made))
        yield DONE

    def _choice(self, piece: Piece) -> dict[str, Any]:
        """Returns a choice without its text."""
        index, reason, told = piece.index, piece.finish_reason, None
        if piece.logprobs is not None:
            is_chat = self.prefix == "chatcmpl"
            told = logprobs(piece.logprobs, self._spellings[index], is_chat=is_chat)
        reason = _FINISH_REASONS.get(reason or "", reason)
        return {"index": index, "logprobs": told, "finish_reason": reason}

    def _first(self) -> list[dict[str, Any]]:
        """Returns what comes before any text."""
        return []

    def _said(self, text: str) -> dict[str, Any]:
        """Returns what a choice says of a whole text, or of a piece (`_added`)."""
        return {"text": text}

    _added = _said

    def _usage(self, made: int) -> dict[str, int]:
        read = self._request.num_prompt_tokens
        counts = {"prompt_tokens": read, "completion_tokens": made}
        return counts | {"total_tokens": read + made}

    def _so_far(self, made: int) -> dict[str, int] | None:
        return self._usage(made) if self._request.counts_along else None

    def _event(self, choices: list[Any], usage: dict[str, int] | None = None) -> str:
        told = self._shared | {"object": self.piece_kind, "choices": choices}
        return _event(told | ({"usage": usage} if self._request.with_usage else {}))


class ChatAnswer(Answer):
    """See `Answer`."""

    prefix, whole_kind = "chatcmpl", "chat.completion"
    piece_kind = "chat.completion.chunk"

    def _first(self) -> list[dict[str, Any]]:
        begin = {"role": "assistant", "content": ""}
        nothing = {"logprobs": None, "finish_reason": None, "delta": begin}
        return [{"index": text.index} | nothing for text in self._request.texts]

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _added(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def logprobs(
    found: Sequence[TokenLogprob], spelling: Spelling, *, is_chat: bool
) -> dict[str, Any]:
    """Returns the log-probabilities of a text's tokens, as a choice holds them.

    Args:
        found: Those of each token.
        spelling: The text before them, which goes on after them.
        is_chat: Whether it is the choice of a chat.
    """
    content, places = list[dict[str, Any]](), list[int]()
    for one in found:
        top = [_told(spelling.bytes_of(id_), value) for id_, value in one.top.items()]
        new, place = spelling.add(one.token_id)
        content.append(_told(new, one.logprob) | {"top_logprobs": top})
        places.append(place)
    if is_chat:
        return {"content": content}
    return {
        "tokens": [one["token"] for one in content],
        "token_logprobs": [one["logprob"] for one in content],
        "top_logprobs": [
            _by_text(one.top, told["top_logprobs"])
            for one, told in zip(found, content, strict=True)
        ],
        "text_offset": places,
    }


def _told(new: bytes, value: float) -> dict[str, Any]:
    """Returns a token and its log-probability; part of a character as OpenAI does."""
    try:
        text = new.decode()
    except UnicodeDecodeError:
        text = "bytes:" + new.decode(errors="backslashreplace")
    return {"token": text, "logprob": value, "bytes": [*new]}


def _by_text(ids: Iterable[int], told: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Returns values by text; less likely tokens of one text go by their number."""
    found: dict[str, float] = {}
    for id_, one in zip(ids, told, strict=True):
        text = one["token"]
        found[f"token_id:{id_}" if text in found else text] = one["logprob"]
    return found


def _event(told: dict[str, Any]) -> str:
    return f"data: {json.dumps(told, ensure_ascii=False)}\n\n"
