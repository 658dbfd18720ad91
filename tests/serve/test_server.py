"""The command, in a process of its own, as OpenAI's client meets it."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai: Any = pytest.importorskip("openai", reason="needs openai: pip install openai")

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = ["--batch-size", "2", "--max-length", "250"]
LONG: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def serving(
    pair: Path, *flags: str, until: str = "serving "
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process, and its address."""
    script = [sys.executable, str(REPOSITORY / "scripts" / "serve.py"), "--port", "0"]
    target = ["--target", f"{pair}/target", "--method", "lookup"]
    quick = {"JAX_COMPILATION_CACHE_DIR": str(pair.parent / "jax")}
    quick |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with subprocess.Popen(
        [*script, *target, *SIZES, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | quick,
    ) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            line = next((x for x in lines if x.startswith(until)), "")
            yield process, line.split()[-1]
        finally:
            process.kill()


def test_the_command_answers_while_it_compiles_and_tells_requests_when_asked_to(
    chat_pair: Path, port: int
) -> None:
    with serving(chat_pair, "--port", str(port), "--log-requests") as (process, url):
        assert process.stderr is not None and url.endswith(f":{port}/v1")
        client = openai.OpenAI(base_url=url, api_key="any")
        client.completions.create(model="target", prompt="a", max_tokens=7)
        line = next(iter(process.stderr.readline, ""))
        assert line.startswith("POST /v1/completions 200, 2 + 7 tokens, ")
    with serving(chat_pair, "--port", str(port), until="compiling") as (process, _):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
        assert refused.value.code == 503 and refused.value.headers["retry-after"]
        refused.value.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_openais_client_is_served_and_a_signal_ends_the_server_after_its_texts(
    chat_pair: Path,
) -> None:
    with serving(chat_pair, "--api-key", "k") as (process, url):
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        (model,) = client.models.list().data
        assert model.id == "target"

        asked: dict[str, Any] = {"model": "target", "prompt": "the ", "seed": 1}
        asked |= {"temperature": 1.0, "n": 2, "max_tokens": 12}
        whole = client.completions.create(**asked)
        texts = ["", ""]
        for piece in client.completions.create(**asked, stream=True):
            texts[piece.choices[0].index] += piece.choices[0].text
        assert [one.text for one in whole.choices] == texts and texts[0] != texts[1]

        messages = [{"role": "user", "content": "so"}]
        chat = client.chat.completions.create(
            model="target", messages=messages, max_completion_tokens=12
        )
        chat_again = client.chat.completions.create(
            model="target", messages=[messages[0], chat.choices[0].message], **LONG
        )
        assert chat.usage.completion_tokens == 12 < chat_again.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="'tools' is not supported"):
            client.chat.completions.create(model="target", messages=messages, tools=[])
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.completions.create(**asked | {"model": "other"})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()

        stream = client.completions.create(
            model="target", prompt="a", stream=True, **LONG
        )
        pieces = [next(stream)]
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            while client.completions.create(**asked):
                pass
        pieces += stream
        assert pieces[-1].choices[0].finish_reason == "length"
        assert process.wait(30) == 0
