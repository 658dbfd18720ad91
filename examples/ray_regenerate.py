"""Answers by many replicas: Ray hands the questions out, each actor holds an engine.

    python examples/ray_regenerate.py --target FOLDER --data FILE --output out.jsonl

Lines are those of `eagle-jax regenerate`, whatever the number of actors: a text depends
on its number and on the seed alone. What an actor had when it was killed is answered by
another; a run that was killed itself goes on after its last whole line.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import ray
import ray.data

import eagle_jax
from eagle_jax.engine.converse import converse
from eagle_jax.logs import JsonLines
from eagle_jax.training.conversations import fingerprint, read_examples
from eagle_jax.training.regenerate import next_index
from eagle_jax.training.writer import Writer


class Answerer:
    """An engine on one machine, or on that machine's share of accelerators."""

    def __init__(self, given: dict[str, Any]) -> None:
        """Loads the pair, and names the questions; nothing is answered yet."""
        eagle_jax.keep_compiled_programs()
        request = eagle_jax.Request(
            temperature=given["temperature"], max_new_tokens=given["max_new_tokens"]
        )
        config = eagle_jax.PairConfig(
            request=request, method="eagle2" if given["draft"] else "autoregressive"
        )
        pair = eagle_jax.load_pair(given["target"], given["draft"], config)
        self.rows, longest = given["batch_size"], given["max_length"]
        self.engine = pair.engine(batch_size=self.rows, max_length=longest)
        writer = Writer(pair=pair, seed=given["seed"], max_length=longest)
        examples = read_examples(Path(given["data"]), need_answers=False).examples
        self.tasks = [*writer.continued(examples, (1, 64))]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answers the questions of a batch, in their order."""
        tasks = [self.tasks[number] for number in batch["id"]]
        found = dict(converse(self.engine, tasks, ahead=self.rows))
        # As JSON: Arrow would give all records the fields of any.
        records = [json.dumps(found[place]) for place in range(len(tasks))]
        return {"id": batch["id"], "record": records}


def main(argv: list[str] | None = None) -> None:
    """Answers what is not on record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="a folder or hub name that all machines find")
    add("--draft", help="an EAGLE head, which makes it quicker")
    add("--data", type=Path, required=True, help="questions; all machines find them")
    add("--output", type=Path, required=True, help="JSON lines; gone on with if there")
    add("--actors", type=int, default=1, help="engines, one per machine")
    add("--gpus", type=float, default=0, help="GPUs of an engine; Ray counts them")
    for name, value in (("batch-size", 16), ("max-new-tokens", 512), ("seed", 0)):
        add(f"--{name}", type=int, default=value)
    add("--max-length", type=int, default=2048, help="of a question and its answer")
    add("--temperature", type=float, default=0.0)
    given = vars(parser.parse_args(argv))
    count = len(read_examples(given["data"], need_answers=False).examples)
    output, actors, gpus = (given.pop(name) for name in ("output", "actors", "gpus"))
    texts = {name: given[name] for name in given if name not in ("draft", "batch_size")}
    texts |= {"data": fingerprint(given["data"])}
    with JsonLines(output, texts) as lines:
        first = next_index(output)
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        left = ray.data.from_items([{"id": number} for number in range(first, count)])
        answered = left.map_batches(
            Answerer,
            fn_constructor_args=(given | {"data": str(given["data"].resolve())},),
            batch_size=4 * given["batch_size"],
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_gpus=gpus,
        )
        for row in answered.iter_rows() if first < count else ():
            if (record := json.loads(row["record"])) is not None:
                lines.append({"index": row["id"]} | record)


if __name__ == "__main__":
    main()
