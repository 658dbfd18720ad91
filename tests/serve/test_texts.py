"""What clients get: the texts of `pair.generate`, in OpenAI's objects."""

import concurrent.futures
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from eagle_jax import Pair, TokenLogprob
from eagle_jax.engine.spelling import Spelling
from eagle_jax.serve.answers import logprobs
from eagle_jax.serve.driver import Driver

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be"}, {"role": "user", "content": "so"}]

# What is asked for, and what other names `pair.request` has for it.
MIXED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 9}, {"max_new_tokens": 9}),
    ({"temperature": 1.0, "seed": 3}, {}),
    ({"temperature": 2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5}, {}),
    ({"max_completion_tokens": 12, "stop": "e"}, {"max_new_tokens": 12}),
    ({"stop": ["e", "a"], "include_stop_str_in_output": True}, {}),
    ({"logit_bias": {"5": 1.5}, "min_tokens": 7}, {"min_new_tokens": 7}),
    ({"repetition_penalty": 1.5, "bad_words": ["e"], "skip_special_tokens": False}, {}),
    ({"presence_penalty": 1, "frequency_penalty": 0.5}, {}),
    ({"stop_token_ids": [7, 270], "ignore_eos": True}, {}),
]
THEIRS = ("max_tokens", "max_completion_tokens", "min_tokens")


def ask(client: TestClient, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    return found.json()


def events(client: TestClient, path: str = COMPLETIONS, **body: Any) -> list[Any]:
    found = client.post(path, json={**body, "stream": True})
    assert found.headers["content-type"].startswith("text/event-stream"), found.text
    *lines, done = found.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(events: list[Any], index: int) -> tuple[str, str | None]:
    choices = [x for one in events for x in one["choices"] if x["index"] == index]
    assert all(one["finish_reason"] is None for one in choices[:-1])
    texts = [x.get("text") or x.get("delta", {}).get("content", "") for x in choices]
    return "".join(texts), choices[-1]["finish_reason"]


def test_texts_of_mixed_requests_are_those_of_generate(
    client: TestClient, pair: Pair
) -> None:
    prompts = [f"{number} the theory of" for number in range(len(MIXED))]
    settings = []
    for here, there in MIXED:
        named = {name: x for name, x in here.items() if name not in THEIRS} | there
        if "logit_bias" in named:
            named["logit_bias"] = {5: 1.5}
        asked: Any = {"max_new_tokens": 16, **named}
        settings.append(pair.request(**asked))
    expected = pair.generate(prompts, settings, batch_size=4, max_length=128)
    bodies = [
        {"prompt": p, **here} for p, (here, _) in zip(prompts, MIXED, strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        whole = [*pool.map(lambda body: ask(client, **body), bodies)]
        streamed = [*pool.map(lambda body: events(client, **body), bodies)]
    for done, one, pieces in zip(expected, whole, streamed, strict=True):
        (choice,) = one["choices"]
        assert choice["text"] == done.text
        assert choice["finish_reason"] == done.finish_reason
        assert joined(pieces, 0) == (done.text, done.finish_reason)
        read, made = len(done.prompt_ids), len(done.token_ids)
        counts = {"prompt_tokens": read, "completion_tokens": made}
        assert one["usage"] == counts | {"total_tokens": read + made}


def test_prompts_are_texts_or_ids_and_have_n_samples_each(
    client: TestClient, pair: Pair
) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 11, "n": 3}
    ids = pair.encode("b")
    expected = pair.generate(["a", ids], max_new_tokens=16, **settings, batch_size=4)
    found = ask(client, prompt=["a", ids], **settings)
    texts = [one["text"] for one in found["choices"]]
    assert texts == [done.text for done in expected]
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3, 4, 5]
    assert found["usage"]["prompt_tokens"] == len(pair.encode("a")) + len(ids)
    pieces = events(client, prompt=["a", ids], **settings)
    assert [joined(pieces, index)[0] for index in range(6)] == texts


def test_a_chat_is_what_the_template_makes_of_it(
    client: TestClient, pair: Pair
) -> None:
    (expected,) = pair.generate([MESSAGES], max_new_tokens=9, max_length=128)
    parts = [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]
    in_parts = [MESSAGES[0], {"role": "user", "content": parts, "name": None}]
    for messages in (MESSAGES, in_parts):
        found = ask(
            client, CHAT, messages=messages, max_tokens=9, user="me", top_k=None
        )
        message = found["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert message["content"] == expected.text
    pieces = events(client, CHAT, messages=MESSAGES, max_tokens=9)
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(pieces, 0) == (expected.text, "length")


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_slots(
    client: TestClient,
) -> None:
    found = ask(client, CHAT, messages=MESSAGES, ignore_eos=True)
    assert found["usage"]["total_tokens"] == 128
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_seed_that_is_not_given_is_drawn(client: TestClient) -> None:
    found = [ask(client, prompt="a", temperature=1.0) for _ in range(2)]
    assert found[0]["choices"][0]["text"] != found[1]["choices"][0]["text"]


def test_a_stream_tells_its_usage_if_it_is_asked_to(client: TestClient) -> None:
    *pieces, last = events(
        client,
        prompt="a",
        max_tokens=5,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    assert all(one["usage"] is None for one in pieces)
    assert "usage" not in events(client, prompt="a", max_tokens=5)[-1]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events(client, prompt="a", max_tokens=5, stream_options=options)
    made = [one["usage"]["completion_tokens"] for one in pieces]
    assert made == sorted(made) and made[-1] == 5 == last["usage"]["completion_tokens"]


def test_a_text_follows_its_schema_or_expression(client: TestClient) -> None:
    pytest.importorskip("outlines_core")
    schema = {"enum": [12, "abcabc"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for given in (
        {"response_format": form},
        {"guided_json": schema},
        {"structured_outputs": {"regex": '12|"abcabc"'}},
    ):
        settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30}
        (choice,) = ask(client, prompt="a", **given, **settings)["choices"]
        assert json.loads(choice["text"]) in schema["enum"]
        assert choice["finish_reason"] == "stop"


def test_a_constraint_that_no_token_can_follow_cuts_the_text_short(
    client: TestClient,
) -> None:
    pytest.importorskip("outlines_core")
    (choice,) = ask(client, prompt="a", guided_regex="ab", bad_words=["b"])["choices"]
    assert choice["text"] == "a" and choice["finish_reason"] == "length"


def test_the_model_its_health_and_its_counts_are_told(
    client: TestClient, driver: Driver
) -> None:
    models = client.get("/v1/models").json()
    assert models["data"][0] == client.get("/v1/models/tiny").json()
    assert models["data"][0]["max_model_len"] == 128
    assert client.get("/health").json() == {"status": "ok"}
    before = counts(client)
    ask(client, prompt="ab", max_tokens=8)
    events(client, prompt="ab", max_tokens=8)
    client.post(COMPLETIONS, json={"prompt": 3})
    after = counts(client)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained['requests_total{outcome="done"}'] == 2
    assert gained['requests_total{outcome="refused"}'] == 1
    assert gained["generated_tokens_total"] == 16
    assert gained["prompt_tokens_total"] == 6
    assert gained["time_to_first_token_seconds_count"] == 1
    rounds, accepted = gained["rounds_total"], gained['accepted_total{depth="1"}']
    assert 0 < rounds <= 14 and 0 <= accepted <= rounds
    assert after["waiting"] == after["running"] == 0
    assert driver.num_claimed == 0


def counts(client: TestClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line[0] != "#"]
    return {name.removeprefix("eagle_jax_"): float(value) for name, value in pairs}


def test_log_probabilities_are_told_in_both_forms(pair: Pair) -> None:
    ids = pair.tokenizer("the é!", add_special_tokens=False).input_ids
    found = [
        TokenLogprob(token_id=id_, logprob=-1.0, top={id_: -1.0, 65: -2.0})
        for id_ in ids
    ]

    def told(is_chat: bool) -> Any:
        return logprobs(found, Spelling(pair.tokenizer, [298]), is_chat=is_chat)

    plain, chat = told(False), told(True)["content"]
    parts = ["bytes:\\xc3", "bytes:\\xa9"]
    assert plain["tokens"] == ["th", "e", " ", *parts, "!"]
    assert plain["text_offset"] == [0, 2, 3, 4, 4, 5]
    other = pair.tokenizer.decode([65])
    assert plain["top_logprobs"][0] == {"th": -1.0, other: -2.0}
    assert [one["logprob"] for one in chat] == plain["token_logprobs"]
    assert b"".join(bytes(one["bytes"]) for one in chat).decode() == "the é!"
    assert all(len(one["top_logprobs"]) == 2 for one in chat)


def test_tokens_of_one_text_keep_their_values(pair: Pair) -> None:
    top = {298: -0.5, 299: -1.0, 65: -2.0}  # Special ones add nothing.
    found = [TokenLogprob(token_id=299, logprob=-1.0, top=top)]

    def told(is_chat: bool) -> Any:
        return logprobs(found, Spelling(pair.tokenizer, [298]), is_chat=is_chat)

    (plain,) = told(False)["top_logprobs"]
    assert plain == {"": -0.5, "token_id:299": -1.0, pair.tokenizer.decode([65]): -2.0}
    (chat,) = told(True)["content"]
    assert [one["logprob"] for one in chat["top_logprobs"]] == [-0.5, -1.0, -2.0]


def test_tokens_of_log_probabilities_are_the_text_whole_and_streamed(
    client: TestClient, pair: Pair
) -> None:
    body = {"prompt": "the theory", "max_tokens": 30, "logprobs": 3}
    body |= {"temperature": 2.0, "seed": 1}
    (choice,) = ask(client, **body)["choices"]
    parts = [one["choices"][0]["logprobs"] for one in events(client, **body)]
    for name in ("tokens", "text_offset"):
        streamed = [x for part in parts if part for x in part[name]]
        assert streamed == choice["logprobs"][name]
    places = choice["logprobs"]["text_offset"]
    for text, place in zip(choice["logprobs"]["tokens"], places, strict=True):
        if not text.startswith("bytes:"):
            assert choice["text"][place:].startswith(text)
    assert places == sorted(places) and len({*places}) > 10
    assert all(len(one) == 3 for one in choice["logprobs"]["top_logprobs"])
    chat = {"messages": MESSAGES, "max_tokens": 30, "logprobs": True}
    (choice,) = ask(client, CHAT, **chat, top_logprobs=3, stop="e")["choices"]
    content = choice["logprobs"]["content"]
    whole = b"".join(bytes(one["bytes"]) for one in content)
    assert whole.decode(errors="replace").startswith(choice["message"]["content"])


def test_log_probabilities_are_those_of_generate(
    client: TestClient, pair: Pair
) -> None:
    body = {"prompt": "the theory", "max_tokens": 6, "logprobs": 2}
    (done,) = pair.generate("the theory", max_new_tokens=6, logprobs=2)
    assert done.logprobs is not None
    expected = [one.logprob for one in done.logprobs]
    (choice,) = ask(client, **body)["choices"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    parts = [one["choices"][0]["logprobs"] for one in events(client, **body)]
    streamed = [x for part in parts if part for x in part["token_logprobs"]]
    assert streamed == pytest.approx(expected, abs=1e-4)
    chat = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    content = ask(client, CHAT, **chat)["choices"][0]["logprobs"]["content"]
    assert len(content) == 3 and all(len(one["top_logprobs"]) == 1 for one in content)
