"""Builds the pages of the site that no folder holds.

The documentation is written for readers of the repository. Here the README becomes the
site's first page, files that a page links to beyond `docs/` become pages, and every
command's help and every public name gets its place. mkdocs calls the functions that
begin with `on_`; `mkdocs.yml` names this file.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import eagle_jax

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RENAMED = {
    ROOT / "README.md": "index.md",
    ROOT / "examples" / "tour.ipynb": "tour.md",
    DOCS / "README.md": "pages.md",
}

# What people import, by use: what they do with it, names of `eagle_jax`, and modules.
USES: tuple[tuple[str, str, str], ...] = (
    (
        "Text in, text out",
        "load_pair load_embedded_pair Pair PairConfig Request "
        "ProcessorConfig LogprobsConfig Generation Piece TokenLogprob StopReason "
        "InputError keep_compiled_programs",
        "methods config processors",
    ),
    ("Serve many requests", "Engine Text", "serve"),
    ("Constrain texts", "Constraint TokenAutomaton", "constraints"),
    (
        "Choose what drafts",
        "TreeConfig StaticConfig ChainConfig LookaheadConfig LookupConfig "
        "RecyclingConfig SwitchConfig",
        "",
    ),
    (
        "Bring a target",
        "Target TargetOutput Params append_rows Transformer TransformerConfig "
        "LayerConfig RopeConfig",
        "interface adapters checkpoints",
    ),
    (
        "Bring a drafter",
        "Drafter Draws Verified DraftModel TreeDrafter SmallModel LookaheadDrafter "
        "LookupDrafter RecyclingDrafter SwitchDrafter EagleHead EagleHeadConfig "
        "Eagle3Head Eagle3HeadConfig",
        "drafting tree heads",
    ),
    (
        "Decode in your own loop",
        "Decoder generate make_requests Requests cache_slots round_up_slots "
        "DecodeState AcceptanceRule speculative autoregressive",
        "decoding sampling",
    ),
    ("Train a head", "", "training"),
    ("Measure it", "", "evaluation"),
    ("Test it", "", "testing"),
    ("Use several devices", "MeshShape", "parallel"),
)
MODULES = [f"eagle_jax.{name}" for _, _, below in USES for name in below.split()]

_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_HTML_LINK = re.compile(r'(?:(?<=href=")|(?<=src=")|(?<=srcset="))[^"#:]+(?=["#])')
_DOCTEST = re.compile(r"^>>> .*\n?(?:^.+\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences the examples of docstrings, which Markdown takes for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Sees every object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n",
                inspect.cleandoc(obj.docstring.value),
            )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that `docs/` does not hold, and lists them in the navigation."""

    def add(where: str, text: str) -> str:
        file = File.generated(config, where, content=text)
        if where.startswith("source/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
        return where

    pages = files.documentation_pages()
    waiting = [*RENAMED, *(DOCS / page.src_uri for page in pages)]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if DOCS not in path.parents or path in RENAMED:
            add(_place(path), _page_of(path))
        if path.suffix == ".md":
            linked = set(_linked_files(path)) - seen
            waiting += [one for one in linked if _place(one).endswith(".md")]
            seen |= linked
    add("commands.md", "\n\n".join(_commands()))
    results = sorted(DOCS.glob("results/*.md"), reverse=True)
    generated: dict[str, list[Any]] = {
        "Results": [f"results/{path.name}" for path in results],
        "API": [
            add("api/index.md", "\n\n".join(_uses())),
            {"eagle_jax": add("api/eagle_jax.md", "\n\n".join(_names()))},
            *({name: add(f"api/{name}.md", _api(name))} for name in MODULES),
        ],
    }
    _fill(config.nav or [], generated)
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Leads links to files of the repository to their pages."""
    source = ROOT / str(page.meta.pop("source", f"docs/{page.file.src_uri}"))

    def place(found: re.Match[str]) -> str:
        linked = _linked(source, found[0])
        if linked is None:
            return found[0]
        return os.path.relpath(_place(linked), Path(page.file.src_uri).parent)

    def url(found: re.Match[str]) -> str:
        linked = _linked(source, found[0])
        file = linked and files.get_file_from_path(_place(linked))
        return file.url_relative_to(page.file) if file else found[0]

    return _HTML_LINK.sub(url, _LINK.sub(place, markdown))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Refuses an API page that lacks a public name."""
    folder, *names = page.file.src_uri.removesuffix(".md").split("/")
    if folder == "api" and names != ["index"]:
        name = names[0]
        module = importlib.import_module(name)
        lost = [
            one
            for one in getattr(module, "__all__", ())
            if f'id="{name}.{one}"' not in html
            and f'id="{name}.{one}.{one}"' not in html
            and not inspect.ismodule(getattr(module, one))
        ]
        if lost:
            raise PluginError(f"{page.file.src_uri} has no {', '.join(lost)}")
    return html


def _fill(nav: list[Any], generated: dict[str, list[Any]]) -> None:
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if title in generated and not below:
                entry[title] = generated[title]
            elif isinstance(below, list):
                _fill(below, generated)


def _linked(source: Path, link: str) -> Path | None:
    """Returns the file of the repository that a page links to, if it is one."""
    path = Path(os.path.normpath(source.parent / link))
    path = path / "README.md" if path.is_dir() else path
    return path if path.is_file() and ROOT in path.parents else None


def _linked_files(path: Path) -> Iterator[Path]:
    text = path.read_text()
    for found in (*_LINK.finditer(text), *_HTML_LINK.finditer(text)):
        linked = _linked(path, found[0])
        if linked is not None:
            yield linked


def _place(path: Path) -> str:
    """Returns where the site has a file of the repository."""
    if path in RENAMED:
        return RENAMED[path]
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    place = f"source/{path.relative_to(ROOT).as_posix()}"
    return place if path.suffix in (".md", ".svg", ".png") else f"{place}.md"


def _page_of(path: Path) -> str:
    """Returns a file as a page, which remembers where it comes from."""
    name = path.relative_to(ROOT).as_posix()
    meta = f"source: {name}"
    if path.suffix == ".md":
        body = path.read_text()
        if RENAMED.get(path) == "index.md":
            # Its tables and commands are wide, and it stands alone in its part.
            meta += "\nhide: [navigation]"
    elif path.suffix == ".ipynb":
        body = "\n\n".join(_cells(json.loads(path.read_text())))
    else:
        kind = {"py": "python"}.get(path.suffix[1:], path.suffix[1:])
        body = f"# {name}\n\n````{kind}\n{path.read_text()}````\n"
    return f"---\n{meta}\n---\n\n{body}"


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output["data"]["text/plain"]
            yield f"```text\n{''.join(shown).rstrip()}\n```"


def _uses() -> Iterator[str]:
    """Yields the first page of the API: what to begin with, by use."""
    yield "# API\n\nWhat to import for what. Names without a dot are `eagle_jax`'s own."
    for title, names, below in USES:
        lines = []
        for name in names.split():
            thing = getattr(eagle_jax, name)
            page = f"eagle_jax.md#eagle_jax.{name}"
            if inspect.ismodule(thing):
                page = f"{thing.__name__.rpartition('.')[0]}.md"
            lines.append(f"- [`{name}`]({page}){_told(thing)}")
        for name in (f"eagle_jax.{one}" for one in below.split()):
            lines.append(
                f"- [`{name}`]({name}.md){_told(importlib.import_module(name))}"
            )
        yield "\n".join([f"## {title}", "", *lines])


def _told(thing: object) -> str:
    """Returns the first line of a docstring, after a colon."""
    # Aliases of types have the docstring of typing's own classes.
    kinds = inspect.ismodule, inspect.isclass, inspect.isroutine
    first = (inspect.getdoc(thing) or "").partition("\n")[0]
    return f": {first}" if first and any(kind(thing) for kind in kinds) else ""


def _names() -> Iterator[str]:
    """Yields the page of the package's own names, by use."""
    yield "# `eagle_jax`"
    yield "::: eagle_jax\n    options:\n      members: []"
    options = "    options:\n      show_root_heading: true\n      heading_level: 3"
    for title, names, _ in USES:
        shown = [
            n for n in names.split() if not inspect.ismodule(getattr(eagle_jax, n))
        ]
        if shown:
            yield f"## {title}"
        yield from (f"::: eagle_jax.{name}\n{options}" for name in shown)


def _api(name: str) -> str:
    """Returns the page of a module or package: its public names."""
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None)
    below = [one.name for one in pkgutil.iter_modules(getattr(module, "__path__", ()))]
    blocks = [f"# `{name}`"]
    if public is None and below:
        blocks += [str(module.__doc__)]
        for one in below:
            blocks += [f"## `{name}.{one}`"]
            blocks += [f"::: {name}.{one}\n    options:\n      heading_level: 3"]
    elif public is None:
        blocks += [f"::: {name}"]
    else:
        blocks += [f"::: {name}\n    options:\n      members: {public}"]
        # Names that a module of the package has, too, stand for that module here.
        hidden = [f"{name}.{one}.{one}" for one in public if one in below]
        shown = "\n    options:\n      show_root_heading: true"
        blocks += [f"::: {one}{shown}" for one in hidden]
    return "\n\n".join(blocks)


def _commands() -> Iterator[str]:
    """Returns the page of commands, written by their own parsers."""
    from eagle_jax.cli.command import Parser
    from eagle_jax.cli.main import COMMANDS

    yield "# Commands"
    yield "`eagle-jax COMMAND`, or in a clone `python scripts/COMMAND.py`."
    for name in COMMANDS:
        main = importlib.import_module(f"eagle_jax.cli.{name.replace('-', '_')}").main
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main(["--help"])
        parser = Parser.latest
        assert parser is not None
        yield f"## {name}\n\n{parser.description}"
        for group in parser._action_groups:
            actions = [one for one in group._group_actions if one.dest != "help"]
            if actions:
                yield f"### {name}: {group.title}\n\n{group.description or ''}"
                yield "\n\n".join(_flag(parser, action) for action in actions)


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    value = formatter._format_args(action, action.dest.upper())
    names = ", ".join(action.option_strings)
    described = " ".join(formatter._expand_help(action).split()) if action.help else ""
    return f"`{f'{names} {value}'.strip()}`\n:   {described or '&nbsp;'}"
