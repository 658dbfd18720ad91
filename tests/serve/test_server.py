"""The command, in a process of its own, as OpenAI's client meets it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai: Any = pytest.importorskip("openai", reason="needs openai: pip install openai")

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = ["--batch-size", "2", "--max-length", "250"]
LONG: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def serving(pair: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
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
            line = next((x for x in lines if x.startswith("serving ")), "")
            yield process, line.split()[-1]
        finally:
            process.kill()


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
