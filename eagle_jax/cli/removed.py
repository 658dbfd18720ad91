"""What to do instead of flags and commands that are gone, for one release."""

REMOVED = {
    "--predict": "run eagle-jax benchmark on the machine itself",
    "--contexts": "give eagle-jax benchmark --prompt-length and --slots",
    "--categories": "give a file of these questions alone",
    "--limit": "give a file of as many records",
    "--config": "give its settings as flags",
    "--json": "leave it out: the table has all; generate alone writes results so",
    "--skip-compilation": "leave it out: compiling is no longer timed",
    "--costs": "leave it out: trees are run on the machine that they are for",
    "--random": "leave it out: without --target the embedded pair writes text",
    "--sweep": "leave it out: all trees of --grid are run",
    "--max-nodes": "static trees are no longer tuned; give `choices` in [tree]",
    "--max-depth": "static trees are no longer tuned; give `choices` in [tree]",
    "--finalists": "leave it out: the slower half is dropped until two are left",
    "--by": "leave it out: exponents are by depth and rank",
    "--inputs": "leave it out: heads read a feature and the token after it",
    "hydra-mlp": "train --kind hydra; heads without a prefix layer still draft",
    "llama-2-chat": "give --template tokenizer, whose chat template is the same",
    "--too-long": "leave it out: longer samples are cut",
    "--max-malformed": "leave it out: what is malformed is left out and counted",
    "--system-prompt": "leave it out: the template's own is taken",
    "--embedding": "leave it out: EAGLE-1/2 heads get the table of --target",
    "--training": "leave it out: eagle-jax train prints the speed of its own steps",
    "typical": "give --acceptance coupled, or rejection: both keep the text lossless",
    "lookahead": "give --method recycling, which needs no weights either",
    "lambda": "give --token-loss alpha",
    "convert": "give the folder itself: it is read in slices, quantized as it is read",
    "count-tokens": "give --draft-vocabulary N@FILE, where FILE is a text to count",
}
"""The advice for each flag, value or command that is gone."""


def instead_of(message: str) -> str:
    """Returns what to do about a refusal of what is gone; nothing for any other.

    >>> instead_of("unrecognized arguments: --sweep")
    '--sweep is gone; leave it out: all trees of --grid are run'
    """
    words = message.replace("'", " ").split()
    gone = next((name for name in REMOVED if name in words), None)
    return f"{gone} is gone; {REMOVED[gone]}" if gone else ""
