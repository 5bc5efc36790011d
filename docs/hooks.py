"""Hooks of MkDocs: they add pages for files outside `docs/` and for the API, and render doctests as code."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File outside `docs/` → its page."""

LINK = re.compile(r'\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)]*)?\)|(?<= src=")(?P<source>[^":]+)')
ROOMS = re.compile(r"^\| ((?:`\w+` ?)+)\|", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `PAGES` and of the API, one for each room in CONTRIBUTING.md; fill folders in `nav`."""
    pages = {page: (ROOT / file).read_text() for file, page in PAGES.items()}
    pages["api/index.md"] = "# API\n\n::: explainers\n    options: {show_submodules: false}\n"
    for names in ROOMS.findall(pages["contributing.md"]):
        pages |= {f"api/{room}.md": api_page(room) for room in re.findall(r"\w+", names)}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    paths = [file.src_uri for file in files.documentation_pages()]
    config.nav = [filled(entry, paths) for entry in config.nav]
    return files


def api_page(room: str) -> str:
    """The page of a room: what it exports, or its modules if it exports nothing."""
    start = ROOT / "explainers" / room / "__init__.py"
    modules = "false" if not start.exists() or "__all__" in start.read_text() else "true"
    return f"# explainers.{room}\n\n::: explainers.{room}\n    options: {{show_submodules: {modules}}}\n"


def filled(entry: Any, paths: list[str]) -> Any:
    """Replace each folder in an entry of `nav` by the pages in it."""
    if isinstance(entry, dict):
        return {title: filled(part, paths) for title, part in entry.items()}
    if isinstance(entry, list):
        return [filled(part, paths) for part in entry]
    return [path for path in paths if path.startswith(entry)] if entry.endswith("/") else entry


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make the links between files of the repository links between pages; a file that has no page is only named."""
    path = page.file.src_uri
    file = {page: file for file, page in PAGES.items()}.get(path, f"docs/{path}")

    def linked(link: re.Match[str]) -> str:
        aim = normpath(PurePosixPath(file).parent / (link["path"] or link["source"]))
        aim_page = PAGES.get(aim, aim.removeprefix("docs/"))
        if files.get_file_from_path(aim_page) is None and (ROOT / aim).exists():
            return link["text"] or link["source"]
        moved = relpath(aim_page, PurePosixPath(path).parent)
        return moved if link["source"] else f"[{link['text']}]({moved}{link['anchor'] or ''})"

    return LINK.sub(linked, markdown)


class Doctests(griffe.Extension):
    """Renders the doctests of docstrings as code; Griffe expects them under a heading `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


class UnpackedArguments(griffe.Extension):
    """Documents the keys of `**name: Unpack[Keys]` as arguments; Griffe's own extension takes them out of `Keys`."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        for parameter in list(func.parameters):
            if str(parameter.annotation).startswith("Unpack["):
                keys = func.parent[str(parameter.annotation)[len("Unpack[") : -1]]
                del func.parameters[parameter.name]
                for key in keys.attributes.values():
                    func.parameters.add(
                        griffe.Parameter(
                            key.name,
                            annotation=key.annotation,
                            kind=griffe.ParameterKind.keyword_only,
                            default="...",
                        )
                    )
