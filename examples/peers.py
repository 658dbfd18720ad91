"""The embedded pair beside other programs that decode, on one clock.

    python examples/peers.py

Every program runs in a process of its own, in turns, on the same prompts, for as many
new tokens of the most likely text, prefills included and what comes before the first
prompt left out. It needs `pip install ".[cli,torch]"`. With `--official FOLDER`, a
clone of SafeAILab/EAGLE, and `--official-python`, a Python whose transformers is of
version 4, as its models need, the official code is among them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Ours is imported where it is run: the official code's Python has no JAX.
ASSETS = Path(__file__).resolve().parents[1] / "eagle_jax" / "assets"
TREES = ("8/7/1", "16/7/4", "26/6/4", "60/6/10")
PEERS = (
    *("eagle_jax plain", *(f"eagle_jax {tree}" for tree in TREES)),
    *(f"eagle_jax {tree} uncalibrated" for tree in TREES),
    *("transformers greedy", "transformers assisted", "transformers lookup"),
)
OFFICIAL = ("official plain", *(f"official {tree}" for tree in TREES))

Decode = Callable[[list[int], int], list[int]]
"""A function from a prompt's ids and a number of tokens to the ids of the text."""


def link(source: Path, folder: Path, *, without: str = "") -> Path:
    """Returns a folder of links to another's files, to which more can be added."""
    linked = folder / source.name
    linked.mkdir()
    for file in source.iterdir():
        if file.name != without:
            (linked / file.name).symlink_to(file)
    return linked


def make_ours(settings: list[str], folder: Path) -> Decode:
    """Returns how the embedded pair decodes with a tree, or plainly."""
    from eagle_jax import load_pair
    from eagle_jax.config import TreeConfig

    head = ASSETS / "head"
    if "uncalibrated" in settings:
        head = link(head, folder, without="calibration.json")
    if settings[0] == "plain":
        pair = load_pair(str(ASSETS / "target"), method="autoregressive")
    else:
        nodes, depth, width = map(int, settings[0].split("/"))
        tree = TreeConfig(num_nodes=nodes, depth=depth, width=width)
        pair = load_pair(str(ASSETS / "target"), str(head), tree=tree)

    def decode(ids: list[int], new_tokens: int) -> list[int]:
        (found,) = pair.generate([ids], max_new_tokens=new_tokens, ignore_eos=True)
        return found.token_ids

    return decode


def make_transformers(settings: list[str]) -> Decode:
    """Returns how transformers decodes: greedily, assisted or by lookup."""
    import torch
    from transformers import AutoModelForCausalLM

    def read(name: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            ASSETS / name, torch_dtype=torch.float32
        ).eval()
        # No token, so that no text ends early; lookup cannot compare with None.
        model.generation_config.eos_token_id = -1
        model.generation_config.pad_token_id = 0
        return model

    model, extra = read("target"), {}
    if settings == ["assisted"]:
        extra["assistant_model"] = read("small")
    if settings == ["lookup"]:
        extra["prompt_lookup_num_tokens"] = 7

    def decode(ids: list[int], new_tokens: int) -> list[int]:
        prompt = torch.tensor([ids])
        limits = {"max_new_tokens": new_tokens, "do_sample": False}
        mask = torch.ones_like(prompt)
        found = model.generate(prompt, attention_mask=mask, **limits, **extra)
        return found[0, len(ids) :].tolist()

    return decode


def make_official(settings: list[str], source: Path, folder: Path) -> Decode:
    """Returns how the official code decodes: plainly, or with a tree."""
    sys.path.insert(0, str(source))
    import torch

    # It is no package, but a clone.
    from eagle.model.ea_model import EaModel  # pyright: ignore[reportMissingImports]

    head = link(ASSETS / "head", folder)
    target = link(ASSETS / "target", folder)
    # It takes the target's table from the file that an index names.
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    tree = "60/6/10" if settings == ["plain"] else settings[0]
    nodes, depth, width = map(int, tree.split("/"))
    model = EaModel.from_pretrained(
        use_eagle3=False,
        base_model_path=str(target),
        ea_model_path=str(head),
        # Its depth leaves the first level out.
        **{"total_token": nodes, "depth": depth - 1, "top_k": width},
        torch_dtype=torch.float32,
    ).eval()
    # No text ends before its last token.
    model.tokenizer = types.SimpleNamespace(eos_token_id=-1)
    run = model.naivegenerate if settings == ["plain"] else model.eagenerate

    def decode(ids: list[int], new_tokens: int) -> list[int]:
        # Its limit counts one token less.
        limits = {"max_new_tokens": new_tokens - 1, "max_length": 512}
        return run(torch.tensor([ids]), **limits)[0, len(ids) :].tolist()

    return decode


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the tokens per second of a program in this process, and its texts."""
    program, *settings = name.split()
    prompts = json.loads(arguments.ids)
    with tempfile.TemporaryDirectory() as folder:
        if program == "eagle_jax":
            decode = make_ours(settings, Path(folder))
        elif program == "transformers":
            decode = make_transformers(settings)
        else:
            decode = make_official(settings, arguments.official, Path(folder))
        for ids in prompts:  # Programs are compiled before the clock begins.
            decode(ids, arguments.new_tokens)
        started = time.perf_counter()
        texts = [decode(ids, arguments.new_tokens) for ids in prompts]
        seconds = time.perf_counter() - started
    speed = sum(map(len, texts)) / seconds
    cut = [text[: arguments.new_tokens] for text in texts]
    return {"tokens_per_second": speed, "texts": cut}


def run(name: str, ids: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what `measure` says of a program in a process of its own."""
    python = sys.executable
    flags = ["--new-tokens", str(arguments.new_tokens), "--ids", ids, "--run", name]
    if name.startswith("official"):
        python = str(arguments.official_python)
        flags += ["--official", str(arguments.official)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [python, __file__, *flags], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"{name}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    """Measures all programs in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--prompts", type=int, default=54, help="how many, spread over all of them")
    add("--new-tokens", type=int, default=100)
    add("--turns", type=int, default=5)
    add("--only", nargs="+", metavar="PROGRAM", help="some, such as 'eagle_jax 8/7/1'")
    add("--official", type=Path, help="a clone of SafeAILab/EAGLE")
    add("--official-python", type=Path, help="a Python with torch, transformers 4")
    add("--ids", help=argparse.SUPPRESS)
    add("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.run:
        print(json.dumps(measure(arguments.run, arguments)))
        return
    from tokenizers import Tokenizer

    from eagle_jax.decoding.rates import repetition

    tokenizer = Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))
    prompts = json.loads((ASSETS / "prompts.json").read_text())
    chosen = prompts[:: max(len(prompts) // arguments.prompts, 1)]
    ids = json.dumps([tokenizer.encode(prompt).ids for prompt in chosen])
    peers = arguments.only or PEERS + (OFFICIAL if arguments.official else ())
    if "eagle_jax plain" not in peers:  # Every other stands beside it.
        peers = ["eagle_jax plain", *peers]
    speeds: dict[str, list[float]] = {name: [] for name in peers}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(arguments.turns):
        for name in peers:
            found = run(name, ids, arguments)
            speeds[name].append(found["tokens_per_second"])
            texts[name] = found["texts"]
            print(f"turn {turn + 1}: {name} {speeds[name][-1]:.0f}", file=sys.stderr)
    plain = texts["eagle_jax plain"]
    packages = (f"{name} {version(name)}" for name in ("jax", "transformers", "torch"))
    token = 1000 / statistics.median(speeds["eagle_jax plain"])
    print(
        f"{len(plain)} prompts, {arguments.new_tokens} new tokens each, medians of "
        f"{arguments.turns} turns on {os.cpu_count()} cores; {', '.join(packages)}. "
        f"A token of eagle_jax plain took {token:.1f} ms, its share of the prefill "
        f"included; {repetition(plain):.0%} of the text's 4-grams repeat.\n"
    )
    print("| program | tokens/s | of eagle_jax plain | texts of eagle_jax plain |")
    print("| --- | --- | --- | --- |")
    for name, values in speeds.items():
        pairs = zip(values, speeds["eagle_jax plain"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        same = sum(one == other for one, other in zip(texts[name], plain, strict=True))
        speed = statistics.median(values)
        print(f"| {name} | {speed:.0f} | {ratio:.2f} | {same} of {len(plain)} |")


if __name__ == "__main__":
    main()
