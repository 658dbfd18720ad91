"""The results of a run as JSON and as one line."""

import dataclasses
from typing import Any

import numpy as np

from eagle_jax.decoding.rates import tokens_per_round
from eagle_jax.decoding.speculative import Round
from eagle_jax.engine import Text
from eagle_jax.reporting import decimals


def run_record(text: Text, *, prompt: str) -> dict[str, Any]:
    """Returns the record of one text, an entry of `runs`."""
    told = {"logprobs": text.logprobs, "prompt_logprobs": text.prompt_logprobs}
    reason = text.stop_reason.name.lower() if text.has_ended else "interrupted"
    rounds = len(text.accept_lengths)
    record = {
        "prompt": prompt,
        "prompt_ids": text.prompt_ids,
        "generated_ids": text.token_ids,
        "text": text.text,
        "stop_reason": reason,
        "accept_lengths": text.accept_lengths,
        "rounds": rounds,
        "rounds_by_tree": text.trees,
        "tokens_per_round": tokens_per_round([len(text.token_ids)], rounds),
        "seed": text.request.seed,
        "finish_reason": text.stop_reason.finish_reason,
    } | {
        name: [dataclasses.asdict(one) for one in tokens]
        for name, tokens in told.items()
        if tokens is not None
    }
    if text.keeps_rounds:
        record["trees"] = [
            tree_record(done) | {"seconds": seconds} for done, seconds in text.rounds
        ]
    return record


def tree_record(done: Round) -> dict[str, Any]:
    """Returns a row's tree: its real nodes in level order, and what was accepted.

    `path` holds the accepted nodes, root first, uncut by limits; `next_token` follows.
    """
    tree, accepted = done.tree, done.acceptance
    real = tree.is_node
    index = np.cumsum(real) - 1  # Padding may lie between them.
    parents = [-1, *index[tree.parents[real][1:]].tolist()]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return {
        "tokens": tree.tokens[real].tolist(),
        "parents": parents,
        "depths": depths,
        "log_values": [round(float(x), 6) for x in tree.log_values[real]],
        "path": index[accepted.path[: accepted.num_accepted + 1]].tolist(),
        "next_token": int(accepted.next_token),
    }


def summary(totals: dict[str, Any]) -> str:
    """Returns the line that a run ends with."""
    parts = [
        f"{totals['tokens']} tokens",
        f"{totals['rounds']} rounds",
        f"{decimals(totals['tokens_per_round'], 2)} tokens/round",
        f"{decimals(totals['tokens_per_second'], 1)} tokens/s",
        f"{totals['compile_seconds']:.1f} s compiling",
    ]
    if len(trees := totals.get("rounds_by_tree", ())) > 1:
        chosen = ", ".join(f"{tree} {count}" for tree, count in trees.items())
        parts.insert(2, f"trees: {chosen}")
    if "speedup" in totals:
        plain = totals["autoregressive_tokens_per_second"]
        identical = {
            True: "identical tokens",
            False: "DIFFERENT TOKENS (near ties, if this is not float32)",
        }
        turns = sorted(totals["speedups"])
        verdict = ", not stable" * (turns[0] < 1 <= turns[-1])
        span = f" ({turns[0]:.2f} to {turns[-1]:.2f} in {len(turns)} turns{verdict})"
        parts += [
            f"autoregressive {decimals(plain, 1)} tokens/s",
            f"speedup {decimals(totals['speedup'], 2)}" + span * (len(turns) > 1),
            identical.get(totals["identical"], "tokens not comparable"),
        ]
    return " | ".join(parts)


def explain_speedup(totals: dict[str, Any]) -> str | None:
    """Returns why a run was slower than plain decoding; `None` if it was not."""
    speedup, brought = totals.get("speedup"), totals["tokens_per_round"]
    if speedup is None or speedup >= 1:
        return None
    return (
        f"drafting did not pay: a round took as long as {brought / speedup:.2f} tokens "
        f"of plain decoding and brought {brought:.2f}; unless other programs slowed it "
        "down, `eagle-jax tune` finds a tree that pays on this machine"
    )
