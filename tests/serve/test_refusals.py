"""What clients cannot have: one line in OpenAI's error object, and nothing else."""

import json
import random
import socket
import sys
from typing import Any

import pytest
from starlette.testclient import TestClient

from eagle_jax import Pair
from eagle_jax.cli.serve import main
from eagle_jax.serve.app import ServeConfig, make_app
from eagle_jax.serve.driver import Driver

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


_TURN = {"messages": [{"role": "user", "content": "a"}]}


def refused(found: Any, status: int, *named: str) -> dict[str, Any]:
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and len(error["message"]) <= 300
    assert all(part in error["message"] for part in named), error
    return error


@pytest.mark.parametrize(
    ("body", "named", "param"),
    [
        ({}, "prompt must be a text, token ids, or a list", None),
        ({"prompt": []}, "prompt must be a text", "prompt"),
        ({"prompt": ["a", 3]}, "prompt must be a list of whole", "prompt"),
        ({"prompt": [[]]}, "prompt must be a text", "prompt"),
        ({"prompt": [1, True]}, "prompt must be a list of whole", "prompt"),
        ({"prompt": [300]}, "the id 300", None),
        ({"prompt": "x" * 300}, "301 tokens|may have 128", "prompt"),
        ({"prompt": "a", "promt": 1}, "the field 'promt' is not", "promt"),
        ({"prompt": "a", "tools": []}, "the field 'tools' is not", "tools"),
        ({"prompt": "a", "echo": True}, "the field 'echo' is not", "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs = 21 must be 0 to 20", "logprobs"),
        ({"prompt": "a", "n": 65}, "65|64", "n"),
        ({"prompt": ["a"] * 40, "n": 2}, "40 prompts with n = 2|64", "n"),
        ({"prompt": "a", "n": 0}, "n = 0 must be", "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens = 0 must be", "max_tokens"),
        ({"prompt": "a", "max_tokens": "3"}, "'3' must be int", "max_tokens"),
        (
            {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 3},
            "max_tokens and max_completion_tokens are both given",
            "max_completion_tokens",
        ),
        (
            {"prompt": "a", "min_tokens": 17},
            "min_tokens = 17|max_tokens = 16",
            "min_tokens",
        ),
        ({"prompt": "a", "temperature": -1}, "temperature = -1", "temperature"),
        ({"prompt": "a", "top_p": 1e-50}, "top_p = 1e-50", "top_p"),
        ({"prompt": "a", "seed": -1}, "seed = -1", "seed"),
        ({"prompt": "a", "seed": 2**32, "n": 2}, "seed = 4294967296", "seed"),
        ({"prompt": "a", "stop": 3}, "stop must be a string", "stop"),
        ({"prompt": "a", "stop": ""}, "strings that are not empty", "stop"),
        ({"prompt": "a", "ignore_eos": "no"}, "must be bool", "ignore_eos"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias must map", "logit_bias"),
        *(
            ({"prompt": "a", "logit_bias": {key: 1}}, "in digits", "logit_bias")
            for key in ("+1", "1_0", " 1", "1.0", "-1", "", "\u0661", "9" * 5000)
        ),
        ({"prompt": "a", "logit_bias": {"7": 1, "07": 2}}, "twice", "logit_bias"),
        ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias|300", None),
        (
            {"prompt": "a", "stop_token_ids": [2**31]},
            "stop_token_ids",
            "stop_token_ids",
        ),
        ({"prompt": "a", "stop": ["a"] * 129}, "128 strings of 256", "stop"),
        ({"prompt": "a", "bad_words": "a" * 257}, "128 strings of 256", "bad_words"),
        ({"prompt": "a", "stop_token_ids": [1] * 129}, "128 ids", "stop_token_ids"),
        (
            {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "may hold 1024 ids",
            "logit_bias",
        ),
        ({"prompt": "a", "guided_regex": "("}, "cannot be compiled", None),
        ({"prompt": "a", "guided_regex": "a", "guided_json": {}}, "both given", None),
        (
            {"prompt": "a", "response_format": {"type": "json_object"}},
            "json_object|is not supported; give text, or json_schema",
            "response_format",
        ),
        (
            {"prompt": "a", "structured_outputs": {"choice": []}},
            "'choice'",
            "structured_outputs",
        ),
        ({"prompt": "a", "stream": "yes"}, "must be bool", "stream"),
        (
            {"prompt": "a", "stream_options": {"x": 1}},
            "continuous_usage_stats, include_obfuscation alone",
            "stream_options",
        ),
        (
            {"prompt": "a", "stream_options": {"include_obfuscation": 1}},
            "include_obfuscation",
            None,
        ),
        ({"messages": []}, "messages must be a list", "messages"),
        *(
            (_TURN | {"chat_template_kwargs": {"chat_template": one}}, named, where)
            for one, named, where in (
                ("{{ 1 }}", "must be the name of one", "chat_template_kwargs"),
                ("rag", "'rag' is the name of no template", None),
            )
        ),
        ({"messages": [3]}, "messages must be an object", "messages"),
        ({"messages": [{"role": "user"}]}, "a role and a content", "messages"),
        (
            {"messages": [{"role": "tool", "content": "", "tool_call_id": "1"}]},
            "'tool_call_id' of a message is not supported",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts of type text alone",
            "messages",
        ),
    ],
)
def test_what_cannot_be_had_is_named(
    client: TestClient, body: dict[str, Any], named: str, param: str | None
) -> None:
    found = client.post(CHAT if "messages" in body else COMPLETIONS, json=body)
    error = refused(found, 400, *named.split("|"))
    assert error["param"] == param


def test_another_model_a_path_and_a_verb_are_told_as_errors(client: TestClient) -> None:
    other = client.post(COMPLETIONS, json={"model": "gpt", "prompt": "a"})
    assert refused(other, 404, "no model 'gpt'", "tiny")["code"] == "model_not_found"
    refused(client.get("/v1/models/gpt"), 404, "no model 'gpt'")
    refused(client.get("/v1/nothing"), 404, "/v1/nothing")
    refused(client.get(COMPLETIONS), 405, "GET /v1/completions")
    refused(client.post(COMPLETIONS, content="{}"), 415, "application/json")


def test_a_body_over_the_limit_is_refused(client: TestClient) -> None:
    chunks = (b"x" * 7_000 for _ in range(3))
    refused(client.post(COMPLETIONS, content=chunks, headers=JSON), 413, "20000")


MALFORMED = [
    *(b"", b"{", b"[]", b"null", b"3", b'"a"', b"\xff\xfe", b"{}{}", b'{"prompt"}'),
    *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "top_p": 1e999}'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "a", "bad_words": ["\\udfff"]}'),
    b'{"prompt": "a", "seed": ' + b"9" * 3_000 + b"}",
    b'{"prompt": ' + b"[" * 2_000 + b"]" * 2_000 + b"}",
]


def test_malformed_bodies_are_refused_and_disturb_nothing(
    client: TestClient, driver: Driver
) -> None:
    good = {"prompt": "the theory", "max_tokens": 16, "seed": 1}
    expected = client.post(COMPLETIONS, json=good).json()["choices"]
    text, rng, bodies = json.dumps(good), random.Random(0), list(MALFORMED)
    while len(bodies) < 60:
        start, end = sorted(rng.sample(range(len(text)), 2))
        bodies.append(
            (text[:start] + rng.choice('{}[]":,\\\x00é') + text[end:]).encode()
        )
    for body in bodies:
        found = client.post(COMPLETIONS, content=body, headers=JSON)
        assert found.status_code == 200 or refused(found, 400), body
    assert client.post(COMPLETIONS, json=good).json()["choices"] == expected
    assert driver.num_claimed == 0


def test_who_does_not_know_the_key_gets_nothing(pair: Pair) -> None:
    driver = Driver(pair, batch_size=4, max_waiting=4, max_length=128)
    config = ServeConfig(model="tiny", api_key="sésame")
    assert "sésame" not in repr(config)
    with TestClient(make_app(driver, config)) as client:
        for key in ("", "Bearer ", "Bearer sesame", "sésame"):
            headers = [(b"authorization", key.encode())]
            found = client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert "Bearer" in found.headers["www-authenticate"]
            assert refused(found, 401)["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200
        refused(client.get("/metrics"), 401)
        known = [(b"authorization", "Bearer sésame".encode())]
        assert client.get("/v1/models", headers=known).status_code == 200


def test_without_a_key_other_hosts_names_are_refused(client: TestClient) -> None:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "127.1.2.3:1"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example:8000", "192.168.0.1", ""):
        refused(client.get("/v1/models", headers={"host": host}), 403, "--api-key")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0 is open to other machines; give --api-key"),
        ("--host example.com", "give --api-key"),
        ("--host 192.0.2.1 --api-key k", "cannot serve: "),
        ("--api-key=", "--api-key is empty"),
        ("--port 70000", "--port = 70000 must be 0 to 65535"),
        ("--max-waiting -1", "--max-waiting = -1"),
        ("--batch-size 0", "batch_size = 0"),
        ("--grace nan", "--grace = nan"),
        ("--draft head", "give --target"),
        ("--mesh data=99", "99 devices"),
        ("--max-length 100000", "512 positions"),
    ],
)
def test_a_server_that_cannot_run_is_refused_in_one_line(
    flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.split()) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and named in line


def test_a_port_that_is_taken_is_told_before_weights_are_read(
    client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: cannot serve: ") and told.count("\n") == 1


def test_the_key_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_JAX_API_KEY", "secret")
    assert main(["--host", "192.0.2.1"]) == 2
    assert "cannot serve" in (told := capsys.readouterr().err)
    assert "secret" not in told


def test_without_its_extra_the_command_tells_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "eagle_jax.serve.server", None)
    assert main([]) == 2
    assert capsys.readouterr().err.endswith(
        "; pip install '.[serve]' in the clone brings it\n"
    )
