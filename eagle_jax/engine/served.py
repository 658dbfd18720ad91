"""A text on its way through a queue."""

import dataclasses
from typing import Any

from eagle_jax.engine.request import Request
from eagle_jax.engine.rows import Row
from eagle_jax.engine.shared import Shared
from eagle_jax.engine.stopping import StoppingText


@dataclasses.dataclass(kw_only=True, eq=False)
class Served:
    """A text: one that waits, is being written or has ended.

    Attributes:
        key: What `Scheduler.add` was given to know it by.
        row: The text; until it has ended, its prompt alone, unless it is streamed.
        settings: The settings of its request.
        priority: Those with a lower one are read before; among equals the first.
        is_streamed: Whether every step returns it.
        stopping: The text as far as it may be shown; `None` if nobody looks before it
            has ended.
        needs: What its request must share with the running ones.
        reused: The tokens of the prompt that were not read again, see `Truncating`.
        length: The tokens of prompt and output, when they were last counted.
        prefill_seconds: The seconds of reading its prompt.
        decode_seconds: Its share of the seconds of rounds that it had with others.
    """

    key: Any
    row: Row
    settings: Request = dataclasses.field(default_factory=Request)
    priority: int = 0
    is_streamed: bool = False
    stopping: StoppingText | None = None
    needs: Shared | None = None
    reused: int = 0
    length: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __repr__(self) -> str:
        """Shows the key and how long the text is, not the ids."""
        size = f"{len(self.row.prompt_ids)} + {len(self.row.generated_ids)} tokens"
        return f"Served({self.key!r}, {size}, {self.row.stop_reason.name})"

    def take(self, row: Row) -> None:
        """Takes in how far the text goes now, up to a stop string."""
        self.row = row if self.stopping is None else self.stopping.take(row)
