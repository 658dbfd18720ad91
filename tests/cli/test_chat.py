"""A conversation in the terminal."""

import builtins
import io
import re
import sys
from pathlib import Path

import pytest

from eagle_jax import Pair, TreeConfig, load_pair
from eagle_jax.cli.chat import main
from tests.helpers import settings_of

SYSTEM = "the rain on the stone is hot " * 4


def converse(pair: Pair, *said: str) -> str:
    """What a terminal shows of the answers to what was said."""
    messages, shown = [{"role": "system", "content": SYSTEM}], ""
    for one in said:
        messages.append({"role": "user", "content": one})
        answer = pair.generate([messages], max_new_tokens=6)[0].text
        messages.append({"role": "assistant", "content": answer})
        shown += answer + "\n"
    return shown


def test_a_conversation_goes_on_reads_what_is_new_and_begins_again(
    chat_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = f"{chat_pair}/target", f"{chat_pair}/head"
    pair = load_pair(*folders, settings_of(TreeConfig(num_nodes=6, depth=2, width=3)))
    lines = ["ten", "", "x" * 600, "/help", "/rest", "no one", "/reset", "no one"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    sizes = ["--num-nodes=6", "--depth=2", "--width=3", "--max-new-tokens=6"]
    pair_flags = ["--target", folders[0], "--draft", folders[1], "--system", SYSTEM]
    assert main([*pair_flags, *sizes]) == 0
    out, err = capsys.readouterr()
    assert out == converse(pair, "ten", "no one") + converse(pair, "no one")
    opening = "/reset begins anew, /help shows this, Ctrl-C ends an answer"
    assert err.index("compiling\n") < err.index(opening)
    assert err.count(f"\n{opening}") == 2
    assert "error: '/rest' is no command here; /reset begins anew" in err
    read = re.findall(r"(\d+) of (\d+) prompt tokens read", err)
    assert len(read) == 3
    # What the system says was read already, in whole chunks.
    assert all(int(new) == int(whole) - 64 for new, whole in read)


def test_ctrl_c_at_the_prompt_asks_once(
    chat_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter([None, "/help", None, None, "never read"])

    def typed(_: str) -> str:
        line = next(said)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(builtins, "input", typed)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    flags = ["--target", f"{chat_pair}/target", "--method", "autoregressive"]
    assert main(flags) == 130
    err = capsys.readouterr().err
    assert err.count("Ctrl-C again, or Ctrl-D, ends the chat") == 2
    assert err.count("/help shows this") == 2
    assert err.endswith("interrupted\n")
    assert next(said) == "never read"
