"""The log of a run, which a resumed run goes on with."""

import itertools
from pathlib import Path
from typing import Any

from eagle_jax.logs import read_log
from eagle_jax.parsing import check_type, parse_json, value_at

LOG = "log.jsonl"
"""The name of the log in a run's folder: a file of `JsonLines`."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the whole rows of a log, see `loop.LogRow.columns`."""
    lines = itertools.islice(read_log(path), 1, None)
    rows = {where: parse_json(line, where) for where, line in lines}
    for where, row in rows.items():
        for name in ("step", "tokens"):
            check_type(int, value_at(row, name), f"{where}: {name}")
    return list(rows.values())
