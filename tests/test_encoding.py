"""Text is UTF-8 whatever the locale of the machine is."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("explainers", "datamodules", "callbacks", "benchmarks")
FILES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


def leaves_encoding_to_the_locale(call):
    """Whether a call reads or writes text, and does not say its encoding."""
    method, function = getattr(call.func, "attr", ""), getattr(call.func, "id", "")
    modes = [str(each.value) for each in call.args[1:2] if isinstance(each, ast.Constant)]
    opens = (function == "open" or method == "fdopen") and "b" not in "".join(modes)
    text = method in ("read_text", "write_text") or opens
    return text and "encoding" not in {each.arg for each in call.keywords}


def test_no_call_leaves_the_encoding_of_text_to_the_locale():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and leaves_encoding_to_the_locale(node)
    ]
    assert not found
