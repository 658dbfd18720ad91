"""Texts and the trees that they came out of, as one page of HTML or one picture."""

from typing import Any

import jinja2

from eagle_jax.cli import results
from eagle_jax.cli.tree_view import lay_out, visible
from eagle_jax.decoding.rates import repetition
from eagle_jax.engine.wording import TextStream
from eagle_jax.errors import InputError
from eagle_jax.reporting import decimals

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("eagle_jax.cli"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def page(record: dict[str, Any], tokenizer: Any) -> str:
    """Returns a page that needs nothing but itself: no script, no font, no network.

    Args:
        record: What `generate --json FILE --trace` writes.
        tokenizer: The tokenizer that gives the tokens' texts.
    """
    settings, totals = record["settings"], record["totals"]
    plain = totals.get("autoregressive_tokens_per_second") or 0.0
    passes = plain / settings["pair"]["batch_size"]  # Of plain decoding, a second.
    return _TEMPLATES.get_template("page.html").render(
        about=_about(settings, record["device"]),
        summary=results.summary(totals),
        texts=[_text(run, tokenizer, passes) for run in record["runs"]],
    )


def picture(record: dict[str, Any], tokenizer: Any) -> str:
    """Returns an SVG of the round that brought most, beside plain decoding's passes.

    It takes what `page` takes.

    Raises:
        InputError: If there was no round.
    """
    rounds = [one for run in record["runs"] for one in _rounds(run, tokenizer)]
    if not rounds:
        raise InputError("--svg draws a round, but no round was needed")
    # Of several, the one in which the likeliest drafts were not the target's.
    best = max(rounds, key=lambda one: (len(one["names"]), one["drawing"].nodes[-1].y))
    return _TEMPLATES.get_template("round.svg").render(best)


def _about(settings: dict[str, Any], device: str) -> str:
    """Returns what the figures of a page depend on, as one line."""
    pair, request = settings["pair"], settings["request"]
    tree = (
        f"{name} {value}"
        for name, value in settings["tree"].items()
        if value is not None and type(value) is not bool
    )
    return (
        f"{pair['method']} ({', '.join(tree)}); target {settings['target']}, draft "
        f"{settings['draft']}; temperature {request['temperature']:g}; "
        f"{pair['dtype']} on {device}"
    )


def _text(run: dict[str, Any], tokenizer: Any, passes: float) -> dict[str, Any]:
    """Returns what the page shows of a text; `passes` is 0 if they are unknown."""
    rounds = _rounds(run, tokenizer)
    for one in rounds:
        plain = f" = {one['seconds'] * passes:.1f} plain passes" if passes else ""
        one["cost"] = f"{1000 * one['seconds']:.1f} ms{plain}"
    seconds = sum(one["seconds"] for one in rounds)
    per_round = 1000 * seconds / len(rounds) if rounds else None
    places = [(None, True)] + [
        (one["number"], position == one["accepted"])
        for one in rounds
        for position in range(len(one["names"]))
    ]
    ids = run["generated_ids"]
    stream = TextStream(tokenizer, run["prompt_ids"], skip_special_tokens=False)
    ends = range(1, len(ids) + 1)
    texts = [stream.update(ids[:end], is_last=end == len(ids)) for end in ends]
    return {
        "prompt": run["prompt"],
        "figures": {
            "tokens": len(ids),
            "rounds": len(rounds),
            "tokens per round": decimals(run["tokens_per_round"], 2),
            "ms per round": decimals(per_round, 1),
            "4-grams that repeat": f"{repetition([ids]):.0%}",
        },
        "tokens": [
            {"text": text, "round": number, "is_own": is_own}
            for text, (number, is_own) in zip(texts, places, strict=False)
        ],
        "rounds": rounds,
    }


def _rounds(run: dict[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Returns what the page shows of each round: its tokens as far as limits let."""
    rounds, ids, begin = [], run["generated_ids"], 1  # The first is the prefill's.
    for number, tree in enumerate(run["trees"], start=1):
        accepted = len(tree["path"]) - 1
        emitted = ids[begin : begin + accepted + 1]
        begin += len(emitted)
        rounds.append(
            {
                "number": number,
                "accepted": accepted,
                "drafted": len(tree["tokens"]) - 1,
                "seconds": tree["seconds"],
                "names": [visible(tokenizer, id_) for id_ in emitted],
                "drawing": lay_out(tree, tokenizer),
            }
        )
    return rounds
