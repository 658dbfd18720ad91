"""Conversations for the tiny pair, whose start and end tokens these are."""

BOS, EOS = 298, 299

CHATS = [
    [("system", "Be"), ("user", "Hi"), ("assistant", "?"), ("user", "So"),
     ("assistant", "?")],
    [("user", "One"), ("assistant", "?")],
    [("user", "Two"), ("assistant", "?"), ("user", "Three"), ("assistant", "?"),
     ("user", "Four")],
]  # fmt: skip
