"""From pieces of texts to the answers that OpenAI's clients read."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from eagle_jax.generation.results import Generation, Piece, TokenLogprob
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

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Returns the answer with all texts, in order."""
        choices = [
            self._choice(number, done.text, done.finish_reason, done.logprobs)
            for number, done in enumerate(generations)
        ]
        made = sum(len(done.token_ids) for done in generations)
        kind = {"object": self.whole_kind, "choices": choices}
        return self._shared | kind | {"usage": self._usage(made)}

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Yields the answer as server-sent events; an error is the last of them."""
        made = 0
        try:
            for choice in self._first():
                yield self._event([choice])
            async for piece in pieces:
                made += len(piece.token_ids)
                if piece.text or piece.logprobs or piece.finish_reason is not None:
                    yield self._event([self._part(piece)])
        except Exception as error:
            yield _event(error_body(error))
            return
        if self._request.with_usage:
            yield self._event([], self._usage(made))
        yield DONE

    def _choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        found: Sequence[TokenLogprob] | None,
    ) -> dict[str, Any]:
        return self._ended(index, reason, found) | {"text": text}

    def _ended(
        self,
        index: int,
        reason: str | None,
        found: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        """Returns a choice without its text."""
        told = None
        if found is not None:
            tokenizer, is_chat = self._request.tokenizer, self.prefix == "chatcmpl"
            told = logprobs(found, tokenizer, is_chat=is_chat)
        reason = _FINISH_REASONS.get(reason or "", reason)
        return {"index": index, "logprobs": told, "finish_reason": reason}

    def _first(self) -> list[dict[str, Any]]:
        """Returns what comes before any text."""
        return []

    def _part(self, piece: Piece) -> dict[str, Any]:
        reason, found = piece.finish_reason, piece.logprobs
        return self._choice(piece.index, piece.text, reason, found)

    def _usage(self, made: int) -> dict[str, int]:
        read = self._request.num_prompt_tokens
        counts = {"prompt_tokens": read, "completion_tokens": made}
        return counts | {"total_tokens": read + made}

    def _event(self, choices: list[Any], usage: dict[str, int] | None = None) -> str:
        told = self._shared | {"object": self.piece_kind, "choices": choices}
        return _event(told | ({"usage": usage} if self._request.with_usage else {}))


class ChatAnswer(Answer):
    """See `Answer`."""

    prefix, whole_kind = "chatcmpl", "chat.completion"
    piece_kind = "chat.completion.chunk"

    def _choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        found: Sequence[TokenLogprob] | None,
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._ended(index, reason, found) | {"message": message}

    def _first(self) -> list[dict[str, Any]]:
        begin = {"role": "assistant", "content": ""}
        numbers = range(len(self._request.asked))
        return [self._ended(number, None) | {"delta": begin} for number in numbers]

    def _part(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        told = self._ended(piece.index, piece.finish_reason, piece.logprobs)
        return told | {"delta": delta}


def logprobs(
    found: Sequence[TokenLogprob], tokenizer: Any, *, is_chat: bool
) -> dict[str, Any]:
    """Returns the log-probabilities of a text's tokens, as a choice holds them.

    Args:
        found: Those of each token.
        tokenizer: A `transformers` tokenizer.
        is_chat: Whether it is the choice of a chat.
    """

    def told(id_: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([id_])
        return {"token": text, "logprob": value, "bytes": [*text.encode()]}

    own = [told(one.token_id, one.logprob) for one in found]
    top = [[told(*pair) for pair in one.top.items()] for one in found]
    if is_chat:
        both = zip(own, top, strict=True)
        return {"content": [one | {"top_logprobs": best} for one, best in both]}
    ends = [len(one["token"]) for one in own]
    return {
        "tokens": [one["token"] for one in own],
        "token_logprobs": [one["logprob"] for one in own],
        "top_logprobs": [{x["token"]: x["logprob"] for x in best} for best in top],
        "text_offset": [sum(ends[:place]) for place in range(len(ends))],
    }


def _event(told: dict[str, Any]) -> str:
    return f"data: {json.dumps(told, ensure_ascii=False)}\n\n"
