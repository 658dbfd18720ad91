import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.training.conversations import read_examples
from tests.helpers import refused

HI = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def _lines(folder: Path, records: list[Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    texts = [r if isinstance(r, str | bytes) else json.dumps(r) for r in records]
    lines = [text if isinstance(text, bytes) else text.encode() for text in texts]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def _shown(path: Path, **settings: Any) -> list[list[tuple[str, str]]]:
    found = read_examples(path, **settings)
    return [[(m["role"], m["content"]) for m in e.messages] for e in found.examples]


def test_sharegpt_and_messages_give_the_same_turns(tmp_path: Path) -> None:
    records = [{"id": "a", "conversations": HI}, {"messages": TURNS}]
    turns = [("user", "Hi"), ("assistant", "Hello")]
    assert _shown(_lines(tmp_path, records)) == [turns, turns]
    path = tmp_path / "list.json"
    path.write_text("\ufeff \n" + json.dumps(records, indent=2), encoding="utf-8")
    assert _shown(path) == [turns, turns]
    assert [e.where for e in read_examples(path).examples] == ["record 1", "record 2"]


def test_lines_are_read_from_a_json_file_and_empty_ones_skipped(tmp_path: Path) -> None:
    lines = [{"run": {"seed": 1}}, {"messages": TURNS}, "", "\r", {"text": "a"}]
    found = read_examples(_lines(tmp_path, lines, "x.json")).examples
    assert [example.where for example in found] == ["line 2", "line 5"]


def test_every_usual_name_of_a_role_is_known(tmp_path: Path) -> None:
    names = (("human", "gpt"), ("user", "assistant"), ("user", "chatgpt"))
    for user, assistant in names:
        turns = [("system", "Be"), (user, "Hi"), (assistant, "Yo"), (user, "Bye")]
        turns.append((assistant, "Bye"))
        record = {"conversations": [{"from": r, "value": v} for r, v in turns]}
        roles = [role for role, _ in _shown(_lines(tmp_path, [record]))[0]]
        assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_the_assistants_first_turn_and_the_users_last_are_dropped(
    tmp_path: Path,
) -> None:
    system = {"role": "system", "content": "Be"}
    answer, question = TURNS[1], TURNS[0]
    whole = [system, answer, answer, *TURNS, question]
    kept = [("user", "Hi"), ("assistant", "Hello")]
    path = _lines(tmp_path, [{"messages": whole}, {"messages": whole[1:]}])
    assert _shown(path) == [[("system", "Be"), *kept], kept]
    assert _shown(path, need_answers=False)[1] == [*kept, ("user", "Hi")]
    path = _lines(tmp_path, [{"messages": TURNS[:1]}])
    assert _shown(path, need_answers=False) == [[("user", "Hi")]]
    refused(lambda: read_examples(path), "no user's turn with an answer")


def test_texts_in_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    turns = [{"role": "user", "content": parts}, TURNS[1]]
    assert _shown(_lines(tmp_path, [{"messages": turns}]))[0][0] == ("user", "Hi")


def test_a_txt_file_holds_documents_between_separators(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_bytes(
        "\ufeffOne\r\n\r\nday\n<|endoftext|>\n\n <|endoftext|> \n"
        "a <|endoftext|> b\u2028c\n".encode()
    )
    found = read_examples(path).examples
    assert [e.text for e in found] == ["One\n\nday", "a <|endoftext|> b\u2028c"]
    assert [e.where for e in found] == ["document 1", "document 3"]


def test_ids_are_kept_exactly_and_win_over_what_stands_beside_them(
    tmp_path: Path,
) -> None:
    odd = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    records = [
        {"index": 0, "text": "ab", "ids": [1, 5, 2**31 - 1]},
        {"messages": odd, "ids": [1, 5, 6], "loss_mask": [0, 1, True]},
    ]
    first, second = read_examples(_lines(tmp_path, records)).examples
    assert first.ids is not None and first.ids.tolist() == [1, 5, 2**31 - 1]
    assert first.ids.dtype == "int32"
    assert first.loss_mask is None and first.text is None
    assert second.loss_mask is not None
    assert second.loss_mask.tolist() == [False, True, True]
    assert len(second.messages) == 2


def _turns(*turns: Any) -> dict[str, Any]:
    return {"messages": list(turns)}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"messages": [', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (b'{"text": "caf\xe9"}', "it is not UTF-8 (invalid continuation byte)"),
        ("3", "no JSON object but 3"),
        ("{}", "neither conversations, messages, text nor ids, but nothing"),
        ({"prompt": "a"}, "text nor ids, but 'prompt'"),
        ({"text": 3}, "its text is no string but 3"),
        ({"text": "\ud83d"}, "its text is not valid Unicode"),
        ({"messages": "Hi"}, "its messages is no list"),
        (_turns("Hi"), "turn 1 has no 'role' and 'content'"),
        ({"conversations": TURNS}, "turn 1 has no 'from' and 'value'"),
        (_turns({"role": "tool", "content": ""}), "unknown role 'tool'"),
        (_turns({"role": "user", "content": None}), "the text of turn 1 is no string"),
        (_turns({"role": "user", "content": [{"image": 1}]}), "turn 1 is no string"),
        (_turns(TURNS[0], TURNS[0]), "turn 2 is the user's, not assistant"),
        (_turns(TURNS[1], *TURNS, TURNS[1]), "turn 4 is the assistant's, not user"),
        (_turns(TURNS[0], {"role": "system", "content": "a"}), "turn 2 is the system"),
        ({"ids": [1, -1]}, "its ids must be a list of integers"),
        ({"ids": [1, 2.5]}, "its ids must be"),
        ({"ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries for 2 ids"),
        ({"ids": [1, 2], "loss_mask": [0, 2]}, "its loss_mask must be"),
        ({"text": " \n"}, "its text is empty"),
        ({"ids": [1]}, "less than two ids"),
        ({"ids": [1, 2], "loss_mask": [0, 0]}, "predicts nothing"),
        ({"messages": TURNS[1:]}, "no user's turn with an answer"),
        (_turns(TURNS[0], {"role": "assistant", "content": " "}), "assistant is empty"),
    ],
)
def test_what_is_malformed_or_teaches_nothing_is_named_by_its_line(
    tmp_path: Path, record: Any, reason: str
) -> None:
    found = read_examples(_lines(tmp_path, [{"text": "good"}, "", record]))
    assert len(found.examples) == len(found.left_out) == 1
    assert found.left_out[0].startswith("line 3: ")
    assert reason in found.left_out[0]
    assert "1 left out (the first: line 3: " in found.summary()
    alone = _lines(tmp_path, [record])
    refused(lambda: read_examples(alone), str(alone), reason)


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("empty.txt", b"\n<|endoftext|>\n \n", "no usable conversation or text"),
        ("empty.json", b"[]", "no usable conversation or text among 0 records"),
        ("empty.jsonl", b"", "no usable conversation or text"),
        ("broken.json", b'[{"text": "a"},', "begins as a JSON list but is not"),
        ("latin.json", b'[{"text": "caf\xe9"}]', "begins as a JSON list but is not"),
        ("latin.txt", b"caf\xe9", "cannot read the data"),
        ("data.csv", b"a", "for documents between lines of <|endoftext|>"),
        ("nowhere.json", None, "No such file"),
    ],
)
def test_what_is_no_data_is_refused(
    tmp_path: Path, name: str, data: bytes | None, named: str
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    refused(lambda: read_examples(path), named, str(path))
