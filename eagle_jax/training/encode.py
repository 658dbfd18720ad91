"""From examples to token ids and the mask of the tokens to be predicted.

Conversations go through the tokenizer's own chat template, and the mask is read off
that template: no offset is written down here. Prompts are encoded exactly as
`eagle-jax generate` does it, so a head sees in training what it sees in use.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eagle_jax.engine.wording import RefusedError, apply_chat_template
from eagle_jax.errors import InputError
from eagle_jax.training.conversations import Example, Message, check_ids


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncodedExample:
    """A sample to train on.

    Attributes:
        tokens: `[n]` int32, the sample's ids, at least 2.
        loss_mask: `[n]` bool, tokens that are to be predicted: the assistant's with
            its end-of-turn token, or all of a plain text but its first.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclasses.dataclass(kw_only=True)
class Encoded:
    """Encoded examples, and the counts of those that did not fit.

    Attributes:
        samples: The samples, in the examples' order; a cut text gives several.
        num_cut: The number of examples that were cut.
        num_empty: The number of examples left out because they hold nothing to be
            predicted: an answer that begins after the limit, a text of one token.
        refused: A line for each conversation that the chat template refuses, such as
            one with a system turn where the template knows none, or in which it does
            not show what the assistant says.
    """

    samples: list[EncodedExample] = dataclasses.field(default_factory=list)
    num_cut: int = 0
    num_empty: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)

    def summary(self) -> str:
        """Returns the counts in one line for a log."""
        tokens = sum(len(sample.tokens) for sample in self.samples)
        predicted = sum(int(sample.loss_mask.sum()) for sample in self.samples)
        line = f"{len(self.samples)} samples | {tokens} tokens, {predicted} of them "
        line += "predicted"
        if self.num_cut:
            line += f" | {self.num_cut} too long and cut"
        if self.num_empty:
            line += f" | {self.num_empty} left out, with nothing to predict"
        if self.refused:
            line += f" | {len(self.refused)} left out ({self.refused[0]})"
        return line


def encode_examples(
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    max_length: int,
    vocab_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Encoded:
    """Encodes examples for training.

    Args:
        examples: The examples that `read_examples` returned.
        tokenizer: A `transformers` tokenizer; conversations need a fast one with a
            chat template, plain text any, exact ids none (it may be `None`).
        max_length: The largest number of tokens of a sample. Longer plain text is cut
            into consecutive pieces; of a conversation the beginning is kept, since what
            follows would lack it.
        vocab_size: The number of tokens the target knows, `V`; ids of the data must be
            below it. `None` for the tokenizer's.
        progress: Called with the number of examples done, after each.

    Raises:
        InputError: If the tokenizer or its template cannot encode such examples, ids
            are not the target's, or nothing is left to train on.
    """
    if any(example.messages and example.ids is None for example in examples):
        check_template(tokenizer)
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    found = Encoded()
    for number, example in enumerate(examples, 1):
        try:
            whole = _encode(example, tokenizer)
        except RefusedError as error:
            found.refused.append(str(error))
        else:
            check_ids(example.where, whole.tokens, vocab_size)
            found.num_cut += len(whole.tokens) > max_length
            pieces = _pieces(example, whole, max_length)
            learnable = [piece for piece in pieces if piece.loss_mask.any()]
            found.num_empty += not learnable
            found.samples += learnable
        if progress is not None:
            progress(number)
    if not found.samples:
        reason = f"{found.summary()}; raise `row_length` = {max_length}"
        if found.refused:
            reason = found.refused[0]
        raise InputError(f"nothing is left to train on: {reason}; or give other data")
    return found


def check_template(tokenizer: Any) -> None:
    """Refuses tokenizers with which no conversation can be encoded."""
    if tokenizer is None or not tokenizer.chat_template:
        raise InputError(
            "conversations need a chat template, but the tokenizer has none; add a "
            "chat_template.jinja to the target's folder or give plain text"
        )
    if not tokenizer.is_fast:
        raise InputError(
            "conversations need a tokenizer of the fast kind; add a tokenizer.json to "
            "the target's folder"
        )


def _encode(example: Example, tokenizer: Any) -> EncodedExample:
    """Encodes one example, uncut."""
    if example.ids is not None:
        return _sample(example.ids, example.loss_mask)
    if example.messages:
        return encode_chat(tokenizer, example.messages, example.where)
    ids = list(tokenizer(example.text or "", verbose=False).input_ids)
    end = tokenizer.eos_token_id
    if end is not None and ids[-1:] != [end]:
        ids.append(end)
    return _sample(np.array(ids, np.int32))


def _sample(tokens: np.ndarray, loss_mask: np.ndarray | None = None) -> EncodedExample:
    """Returns a sample whose first token, which follows nothing, is not predicted."""
    mask = np.ones(len(tokens), np.bool_) if loss_mask is None else loss_mask.copy()
    mask[:1] = False
    return EncodedExample(tokens=tokens.astype(np.int32), loss_mask=mask)


def _pieces(
    example: Example, whole: EncodedExample, max_length: int
) -> list[EncodedExample]:
    """Returns the pieces that are kept of a sample."""
    length = len(whole.tokens)
    if length <= max_length:
        return [whole]
    starts = [0] if example.messages else range(0, length, max_length)
    spans = [slice(start, start + max_length) for start in starts]
    return [_sample(whole.tokens[span], whole.loss_mask[span]) for span in spans]


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], where: str, *, is_prompt: bool = False
) -> EncodedExample:
    """Encodes a conversation, with a mask of what the assistant says.

    Args:
        tokenizer: A tokenizer with a chat template, see `check_template`.
        messages: The conversation.
        where: The conversation's name in errors.
        is_prompt: Whether its last turn is the user's, and the assistant's begins:
            the ids that `eagle-jax generate --chat` would decode from.

    Raises:
        RefusedError: If the template refuses the conversation, or its assistant turns
            cannot be told apart.
    """
    text, spans = _render(tokenizer, messages, where, is_prompt=is_prompt)
    if spans is None:
        spans = _assistant_spans(tokenizer, messages, text, where)
    encoding = tokenizer(  # The template writes the special tokens itself.
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    tokens = np.array(encoding["input_ids"], np.int32)
    offsets = np.array(encoding["offset_mapping"]).reshape(-1, 2)
    mask = np.zeros(len(tokens), np.bool_)
    for start, end in spans:
        # A token that joins the prompt's end and the answer's beginning is the first
        # that the assistant must predict.
        mask |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    mask = _settle_ends(tokenizer, text, tokens, encoding["offset_mapping"], mask)
    return _sample(tokens, mask)


def _assistant_spans(
    tokenizer: Any, messages: Sequence[Message], text: str, where: str
) -> list[tuple[int, int]]:
    """Returns where in the text the assistant's turns begin and end.

    A turn is what the template adds to the prompt that asks for it. Templates that
    leave out what was thought in earlier turns do not simply add, and are refused.
    """
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = _render(tokenizer, messages[:number], where, is_prompt=True)
        after, _ = _render(tokenizer, messages[: number + 1], where)
        if not (text.startswith(after) and after.startswith(before)):
            raise RefusedError(
                f"{where}: the chat template renders turn {number + 1} differently "
                "when it is the last one, so answers cannot be found; enclose them in "
                "{% generation %} in chat_template.jinja, or give chats of one answer"
            )
        spans.append((len(before), len(after)))
    return spans


def _settle_ends(
    tokenizer: Any,
    text: str,
    tokens: np.ndarray,
    offsets: Sequence[tuple[int, int]],
    mask: np.ndarray,
) -> np.ndarray:
    """Lets every turn of the assistant end with its end-of-turn token.

    Templates differ in whether their {% generation %} block holds that token, and
    many write a line break after it, which no model is asked to predict.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {token for token, added_token in added if added_token.special}
    special |= set(tokenizer.all_special_ids)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    settled = mask.copy()
    for start, end in edges.reshape(-1, 2).tolist():
        # The bytes of one character may be tokens of their own.
        while end < len(tokens) and offsets[end] == offsets[end - 1]:
            settled[end] = True
            end += 1
        inside = [i for i in range(start, end) if int(tokens[i]) in special]
        if inside and not text[offsets[inside[-1]][1] : offsets[end - 1][1]].strip():
            settled[inside[-1] + 1 : end] = False
        elif end < len(tokens) and int(tokens[end]) in special:
            settled[end] = int(tokens[end]) != tokenizer.bos_token_id
    return settled


def _render(
    tokenizer: Any, messages: Sequence[Message], where: str, *, is_prompt: bool = False
) -> tuple[str, list[tuple[int, int]] | None]:
    """Applies the chat template; an error that it raises is about the messages."""
    try:
        return apply_chat_template(tokenizer, messages, add_generation_prompt=is_prompt)
    except RefusedError as error:
        raise RefusedError(f"{where}: {error}") from error
