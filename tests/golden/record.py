"""Records what commands and the server answer, or compares it with the recording.

    PYTHONPATH=TREE python tests/golden/record.py FOLDER
    PYTHONPATH=TREE python tests/golden/record.py --compare

The first writes `FOLDER/expected.json.gz`. The second tells which entries differ from
those of the file beside this one, and where, and exits with 1 if any does. Times,
speeds, versions, random ids and folders are left out. Floats are recorded to the last
bit, which another machine or another JAX may compute differently.
"""

import concurrent.futures
import contextlib
import gzip
import http.client
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE, NAME = Path(__file__).resolve().parent, "expected.json.gz"
SHARED = Path(os.environ.get("EAGLE_JAX_SHARED") or HERE.parents[2] / "shared")

STORIES = "--target SHARED/models/stories260K --draft SHARED/models/stories260K-eagle"
RANDOM = "--target SHARED/models/random9 --draft SHARED/models/random9-eagle3"
TREE = "--num-nodes 12 --depth 4 --width 3"
SAMPLED = "--temperature 0.8 --seed 7"
TWO = "--prompt 'class Stack:' --prompt 'import os'"
PENALTIES = (
    "--repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty 0.3 "
    "--no-repeat-ngram-size 3 --min-new-tokens 9 --logit-bias 5=2 --bad-words self def"
)
GENERATE = {
    "greedy": "",
    "sampled": f"{SAMPLED} --top-p 0.95 --top-k 40 --min-p 0.01",
    "batch": f"{SAMPLED} {TWO} --prompt 'x = [' --batch-size 3",
    "samples": f"{SAMPLED} --num-samples 3 --batch-size 2",
    "queue": f"{SAMPLED} --prompts FOLDER/queue.json --batch-size 2",
    "stop": f"{TWO} --stop 'faults are' --stop-token-ids 511 --keep-special-tokens",
    "regex": rf"{SAMPLED} --regex '    return [a-z]{{2,9}}\([a-z, ]{{2,20}}\)'",
    "json_schema": f"{SAMPLED} --json-schema FOLDER/schema.json",
    "penalties": f"{SAMPLED} {PENALTIES}",
    "lookup": "--method lookup --depth 3 --max-ngram 2 --prompt 'a = [1, 2, 1, 2, 1'",
    "autoregressive": f"{SAMPLED} --method autoregressive",
    "logprobs": f"{SAMPLED} --logprobs 2 --prompt-logprobs 1",
    "trace": f"{TREE} --trace --show-tree",
    "stream": f"{SAMPLED} --stream --ignore-eos",
    "compare": f"{SAMPLED} {STORIES} {TREE} --compare",
    "rejection": f"{SAMPLED} {STORIES} --method chain --depth 3 --acceptance rejection",
    "eagle1": f"{STORIES} --method eagle1 --prompt 'Lily and Tom were'",
    "eagle3": f"{SAMPLED} {RANDOM} {TREE}",
}
QUEUE = ["def main():", "class Stack:\n", "import os\n", "x = [", "for name in"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}

WHOLE, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "def main():", "max_tokens": 24}
TALK = {"messages": [{"role": "user", "content": "def area("}], "max_tokens": 20}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 3}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
SERVE = (
    "--target FOLDER/target --draft PACKAGE/assets/head --served-model-name golden "
    "--num-nodes 8 --depth 7 --width 1 --batch-size 4 --max-length 160 --port 0"
)
HTTP: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (WHOLE, PROMPT),
    "prompts_and_n": (WHOLE, PROMPT | DRAWN | {"prompt": QUEUE[1:3], "n": 2}),
    "stop": (WHOLE, PROMPT | {"stop": ["return", "("]}),
    "logprobs": (WHOLE, PROMPT | DRAWN | {"logprobs": 2}),
    "regex": (WHOLE, PROMPT | DRAWN | {"guided_regex": "    [a-z]{3,9} = [0-9]+"}),
    "stream": (WHOLE, PROMPT | DRAWN | STREAM | {"n": 2}),
    "chat": (CHAT, TALK),
    "chat_json": (CHAT, TALK | DRAWN | {"response_format": FORM, "max_tokens": 40}),
    "chat_stream": (CHAT, TALK | DRAWN | {"stream": True, "stop": "turn"}),
    "refused_field": (WHOLE, PROMPT | {"echo": True}),
    "refused_value": (WHOLE, PROMPT | {"temperature": -1}),
    "refused_length": (WHOLE, {"prompt": "x = 1\n" * 100}),
    "refused_model": (CHAT, TALK | {"model": "other"}),
}

EAGLE2 = "eagle2:num_nodes=12,depth=4,width=3"
EVALUATE = {
    "nodes": f"--nodes --methods {EAGLE2} autoregressive --temperatures 1 "
    "--batch-sizes 1 2",
    "greedy": f"--methods {EAGLE2} lookup --batch-sizes 2",
}
DRAFTED = "--draft PACKAGE/assets/head --num-nodes 6 --depth 3 --width 2"
REGENERATE = {
    "data": "--data FOLDER/data.jsonl",
    "data_drafted": f"--data FOLDER/data.jsonl {DRAFTED}",
    "samples": f"--samples 3 {DRAFTED}",
}
WRITTEN = "--max-new-tokens 16 --temperature 0.2 --batch-size 2 --max-length 160"

QUESTIONS = [
    {"question_id": 1, "category": "qa", "turns": ["Once upon a time", "Lily"]},
    {"question_id": 2, "category": "writing", "turns": ["One day, a dog"]},
    {"question_id": 3, "category": "qa", "turns": ["Tom was playing"]},
]
MAIN = 'import unittest\n\nif __name__ == "__main__":\n    unittest.main'
HUMAN, GPT = {"from": "human", "value": "class Node:"}, {"from": "gpt", "value": "?"}
USER, ANSWER = {"role": "user", "content": MAIN}, {"role": "assistant", "content": "?"}
DATA = [
    {"conversations": [HUMAN, GPT]},
    {"messages": [USER, ANSWER, USER, ANSWER]},
    {"text": "def insort_right(a, x, lo=0, hi=None):\n    return a"},
]
INPUTS = {
    "queue.json": json.dumps(QUEUE),
    "schema.json": json.dumps(SCHEMA),
    "questions.jsonl": "\n".join(map(json.dumps, QUESTIONS)),
    "data.jsonl": "\n".join(map(json.dumps, DATA)),
    "target/chat_template.jinja": "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}\n{% endif %}{% endfor %}",
}

LEFT_OUT = re.compile(
    "(.*_)?seconds|.*tokens_per_second|speedups?|wall_time|tstamp|answer_id|created|"
    "versions|device"
)
TIMED = re.compile(r"[\d.]+(?= s\b| tokens/s)|(?<=speedup )[^|]+")

Folders = dict[str, str]
Entries = Iterator[tuple[str, Any]]


def words(flags: str, folders: Folders) -> list[str]:
    for name, folder in folders.items():
        flags = flags.replace(name, folder)
    return shlex.split(flags)


def run(command: str, flags: str, folders: Folders) -> list[str]:
    """The lines that `python -m eagle_jax` prints, without times."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["eagle-jax", command, *words(flags, folders)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("eagle_jax", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{command} {flags}: {err.getvalue()}") from end
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored since its end.
    return TIMED.sub("#", out.getvalue()).splitlines()


@contextlib.contextmanager
def serving(folders: Folders) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server, which is ready."""
    command = [sys.executable, "-m", "eagle_jax", "serve", *words(SERVE, folders)]
    # In another folder `-m` finds the package that this process finds.
    with subprocess.Popen(
        command, cwd=folders["FOLDER"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        told: list[str] = []
        try:
            while not (line := process.stderr.readline()).startswith("serving "):
                told.append(line)
                if not line:
                    raise RuntimeError("serve: " + "".join(told))
            yield http.client.HTTPConnection(line.split("/")[2])
        finally:
            process.terminate()


def generated(cases: dict[str, str], folders: Folders) -> Entries:
    for name, flags in cases.items():
        flags = f"--max-new-tokens 32 {flags} --json FOLDER/out.json"
        shown = run("generate", flags, folders)
        record = json.loads(Path(folders["FOLDER"], "out.json").read_text())
        yield f"generate/{name}/settings", record.pop("settings")
        yield f"generate/{name}", record | {"stdout": shown}


def answered(cases: dict[str, Any], folders: Folders) -> Entries:
    with serving(folders) as server:
        for name, (path, body) in cases.items():
            kind = {"content-type": "application/json"}
            server.request("POST", path, json.dumps(body), kind)
            answer = server.getresponse()
            text = answer.read().decode()
            told = joined(text) if body.get("stream") else json.loads(text)
            yield f"http/{name}", {"status": answer.status, "answer": told}


def joined(stream: str) -> dict[str, Any]:
    """The last event of a stream, and the pieces of each text as one."""
    *events, done = (x.removeprefix("data: ") for x in stream.strip().split("\n\n"))
    last, texts, reasons = {}, dict[str, str](), {}
    for last in map(json.loads, events):
        for choice in last["choices"]:
            index, delta = str(choice["index"]), choice.get("delta", choice)
            piece = delta.get("text", delta.get("content", ""))
            texts[index] = texts.get(index, "") + piece
            reasons[index] = choice["finish_reason"]
    return {"last": last, "done": done, "texts": texts, "finish_reasons": reasons}


def evaluated(cases: dict[str, str], folders: Folders) -> Entries:
    for name, flags in cases.items():
        files = f"--questions FOLDER/questions.jsonl --output FOLDER/{name}"
        run("evaluate", f"{STORIES} {files} {flags} --max-new-tokens 12", folders)
        for path in sorted(Path(folders["FOLDER"], name).iterdir()):
            settings, *records = map(json.loads, path.read_text().splitlines())
            yield f"evaluate/{name}/{path.stem}/settings", settings
            yield f"evaluate/{name}/{path.stem}/order", [x["number"] for x in records]
            records.sort(key=lambda one: one["number"])
            yield f"evaluate/{name}/{path.stem}", records


def regenerated(cases: dict[str, str], folders: Folders) -> Entries:
    for name, flags in cases.items():
        files = f"--target FOLDER/target --output FOLDER/{name}.out"
        shown = run("regenerate", f"{files} {WRITTEN} {flags}", folders)
        lines = Path(folders["FOLDER"], f"{name}.out").read_text().splitlines()
        settings, *texts = map(json.loads, lines)
        yield f"regenerate/{name}/settings", settings
        yield f"regenerate/{name}", {"texts": texts, "stdout": shown}


def record(part: Callable[[Any, Folders], Entries], cases: Any) -> dict[str, Any]:
    """The entries of some cases by their names, of the package that Python finds."""
    found = importlib.util.find_spec("eagle_jax")
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    print(f"{part.__name__} by {package}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(package / "assets" / "target", f"{name}/target")
        for file, text in INPUTS.items():
            Path(name, file).write_text(text)
        folders = {"FOLDER": name, "PACKAGE": str(package), "SHARED": str(SHARED)}
        return {key: plain(entry, folders) for key, entry in part(cases, folders)}


def plain(value: Any, folders: Folders) -> Any:
    """An entry without what is another one each time."""
    text = re.sub(r"cmpl-\w{32}", "cmpl-#", json.dumps(value))
    for name, folder in folders.items():
        text = text.replace(folder, name)

    def known(found: dict[str, Any]) -> dict[str, Any]:
        return {k: "#" if LEFT_OUT.fullmatch(k) else x for k, x in found.items()}

    return json.loads(text, object_hook=known)


def leaves(value: Any, name: str = "") -> Entries:
    """Every number and text of an entry, and where it is."""
    pairs = enumerate(value) if isinstance(value, list) else value.items()
    for key, one in pairs:
        if isinstance(one, dict | list) and one:
            yield from leaves(one, f"{name}{key}.")
        else:
            yield f"{name}{key}", one


def compare(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Tells which entries differ, and where; returns whether any does."""
    differing = 0
    for entry in old | new:
        there, here = (dict(leaves(one.get(entry, {}))) for one in (old, new))
        pairs = [
            (key, there.get(key, "nothing"), here.get(key, "nothing"))
            for key in there | here
        ]
        changed = [pair for pair in pairs if repr(pair[1]) != repr(pair[2])]
        if not changed:
            continue
        differing += 1
        gaps = [abs(a - b) for _, a, b in changed if type(a) is type(b) is float]
        floats = f"{len(gaps)} floats, by at most {max(gaps, default=0):.1g}"
        print(f"{entry}: {len(changed)} of {len(pairs)} values differ ({floats})")
        changed.sort(key=lambda pair: isinstance(pair[1], float))
        for key, a, b in changed[:8]:
            print(f"    {key}: {a!r} -> {b!r}")
    print(f"{differing} of {len(old | new)} entries differ")
    return differing > 0


def main(where: str) -> int:
    os.environ |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "88"}
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # They take minutes.
    if importlib.metadata.version("jax").startswith("0.10."):  # As in tests/devices.py.
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_use_fusion_emitters=false "
            "--xla_cpu_parallel_codegen_split_count=1"
        )
    generate = [*GENERATE.items()]
    tasks = [
        (generated, dict(generate[:9])),
        (answered, HTTP),
        (generated, dict(generate[9:])),
        (evaluated, EVALUATE),
        (regenerated, REGENERATE),
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        found = pool.map(record, *zip(*tasks, strict=True))
        entries = {name: entry for some in found for name, entry in some.items()}
    if where == "--compare":
        return compare(json.loads(gzip.decompress((HERE / NAME).read_bytes())), entries)
    text = json.dumps(entries, indent=1)
    file = Path(where, NAME)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(entries)} entries in {file}, {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
