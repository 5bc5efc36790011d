"""What the server of the page answers, and to whom."""

import base64
import io
import json
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import timm
import torch
from conftest import timm_model
from PIL import Image
from safetensors.torch import save_file

from explainers.app.page import build_page, serve
from explainers.app.page.guard import LARGEST_BODY, MOST_BODIES, Guard
from explainers.app.page.serving import FRAME, import_gradio
from explainers.app.session import Session
from explainers.auditing.audit import Audit
from explainers.auditing.groups import Centres
from explainers.errors import InputError

httpx = pytest.importorskip("httpx")
if find_spec("gradio") is None:  # which takes seconds to import
    pytest.skip("Gradio is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow
CLIENT = httpx.Client(timeout=600)
"""One for all questions: each new one reads the certificates of the machine."""

ASKED = "/gradio_api/component_server/"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.getbasetemp() / "uploads"))
        audit = tmp_path_factory.mktemp("audit")
        found = Audit([], [], {}, (1, 1), {}, Centres(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long)))
        found.save(audit)
        (audit / "audit.html").write_text(f'<p>groups</p>"id":"{found.id}"')
        page = serve(timm_model(), method="GAE", port=port, block=False, audit=audit)
        yield page
        page.close()


def test_a_port_in_use_is_told_in_one_line(page, target):
    port = page.server_port
    with pytest.raises(InputError, match=rf"expected a free port .*, got 127\.0\.0\.1:{port}, .* --port 7861"):
        serve(target, method="Chance", port=port, block=False)


def test_the_page_of_an_audit_is_in_a_tab_of_a_server_that_has_one(page, target, tmp_path):
    assert CLIENT.get(f"{page.local_url}audit").text.startswith("<p>groups</p>")
    assert refusal(path="/audit", method="GET") == refusal(path="/audit/results.json", method="GET") == 404
    assert FRAME in [getattr(block, "value", None) for block in page.blocks.values()]
    with pytest.raises(InputError, match=f"^expected the folder of an audit, got {tmp_path} without"):
        serve(target, audit=tmp_path, block=False)


def routes_of(router):
    """All routes of Gradio, also those of its router for the API."""
    for route in router.routes:
        yield from [route] if hasattr(route, "path") else routes_of(route.original_router)


def test_the_routes_that_are_answered(page):
    """Gradio has some 80 others: a later version may bring more."""
    tried = {(method, route.path) for route in routes_of(page.app) for method in getattr(route, "methods", ["GET"])}
    assert {("GET", "/gradio_api/file={path_or_url:path}"), ("POST", "/gradio_api/upload")} < tried
    assert ("POST", "/gradio_api/run-history/connect") not in tried
    replies = {
        (method, path): CLIENT.request(
            method, page.local_url + re.sub("{[^}]*}", "x", path[1:]), json={} if method == "POST" else None
        )
        for method, path in sorted(tried)
    }
    answered = {  # a refused HEAD has no text
        asked: reply.status_code
        for asked, reply in replies.items()
        if reply.status_code != 404 or reply.text not in ("", "not found")
    }
    assert answered == {
        ("GET", "/"): 200,
        ("HEAD", "/"): 200,
        ("GET", "/assets/{path:path}"): 404,
        ("GET", "/favicon.ico"): 200,
        ("GET", "/gradio_api/startup-events"): 200,
        ("GET", "/manifest.json"): 200,
        ("GET", "/static/{path:path}"): 404,
        ("GET", "/theme.css"): 200,
        ("POST", ASKED): 400,
    }


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "[::1]:7860"}, 200),
        ({"Host": "192.168.0.7"}, 200),
        ({"Host": socket.gethostname()}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:7860"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://["}, 403),
    ],
)
def test_pages_of_others_are_refused(page, headers, status):
    reply = CLIENT.get(page.local_url, headers=headers)
    assert reply.status_code == status and (status == 200 or len(reply.text.splitlines()) == 1)


def refusal(domain=None, path=ASKED, method="POST", host="127.0.0.1:7860", **headers):
    """The status with which a request is refused; `None` for one that is passed on."""
    headers = {"host": host, "content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    scope = {"type": "http", "method": method, "path": path}
    refused = Guard(None, "0.0.0.0", domain)._refusal(
        scope | {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    )
    return refused and refused[0]


def test_a_name_of_the_user_and_a_public_page_are_let_in():
    site = {"host": "my.example", "origin": "https://my.example"}
    assert refusal(**site) == 403 and refusal("my.example", **site) is None and refusal("*", **site) is None
    assert refusal("My.Example", origin="https://my.example") is None  # a proxy that passes its own address on
    assert refusal("my.example", host="evil.example") == 403
    assert refusal("my.example", origin="https://evil.example") == 403
    assert refusal("*", path="/gradio_api/upload") == 404
    assert refusal(origin="http://127.0.0.1:7860") is None


def test_what_a_page_of_others_sends_without_asking_first_is_refused():
    assert refusal(content_type="text/plain") == refusal(content_type="multipart/form-data; boundary=x") == 415
    assert refusal(content_length=str(LARGEST_BODY + 1)) == 413


def test_questions_take_a_limited_memory(page):
    """Also one that does not tell its length."""

    def pieces():
        yield from (b" " * 2**20 for _ in range(LARGEST_BODY // 2**20 + 1))

    headers = {"content-type": "application/json"}
    assert CLIENT.post(page.local_url + ASKED[1:], content=pieces(), headers=headers).status_code == 400
    assert MOST_BODIES >= 2 * LARGEST_BODY


def test_the_run_history_is_closed_in_an_app_of_others(target):
    """It lends visitors from this machine the Hugging Face token of whoever has started the app."""
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    app = import_gradio().mount_gradio_app(FastAPI(), build_page(Session(target, "GAE")), "/explain")
    (mounted,) = [route.app for route in app.routes if getattr(route, "path", None) == "/explain"]
    paths = [route.path for route in routes_of(mounted)]
    assert "/gradio_api/runs" in paths and not any("run-history" in path for path in paths)
    with TestClient(mounted) as client:
        assert client.get("/gradio_api/runs").status_code == 404


def test_building_a_page_opens_no_connection(target, no_sockets):
    build_page(Session(target, "GAE")).close()
    assert no_sockets == []


def post(page, name, question, **changes):
    component, _ = [block for block in page.blocks.values() if type(block).__name__ == "HTML"]
    return ask(page.local_url, name, question, **{"component_id": component._id} | changes)


def ask(url, name, question, **of):
    body = {"session_hash": "a", "fn_name": name, "data": question} | of
    headers = {"content-type": "application/json"}
    return CLIENT.post(url + ASKED[1:], content=json.dumps(body), headers=headers)


OF_HEATMAP = {"method": "GAE", "index": 0}
MALFORMED = {
    "open_image": [[], "x", None, 3, {"data": 3}, {"data": ["x"]}, {"data": None}, {"name": 3}, {"file": ""}],
    "heatmap": [
        *({}, {"index": 0}, {"method": "GAE"}, {"image": "x"}, OF_HEATMAP | {"self": 1}, OF_HEATMAP | {"key": ["x"]}),
        *(OF_HEATMAP | {"method": each} for each in (["GAE"], {}, None, 3)),
        *(OF_HEATMAP | {"index": each} for each in ([0], {}, None, 1.5, True)),
        *(OF_HEATMAP | {"against": each} for each in (1, "class 1", [[1]], [None], {"1": 1})),
    ],
    "curves": [{"methods": each, "index": 0, "side": "most"} for each in ("GAE", None, [3], {"GAE": 1})],
    "scores": [{"index": 0, "hidden": each} for each in (3, [3], [["1"]], [[0.5]], [[True]], None)],
    "prompts": [{"texts": each} for each in ("cat", [3], None)],
    "picture": [{"methods": ["GAE"], "index": 0, "smooth": "yes"}],
    "alike": [{"other": ["x"]}, {"other": None}, {}],
}


def test_malformed_questions_are_refused_in_one_line(page):
    key = post(page, "open_image", {}).json()["key"]
    assert "tiles" in post(page, "heatmap", OF_HEATMAP | {"key": key}).json()
    for name, questions in MALFORMED.items():
        for question in questions:
            keyed = {"key": key} | question if isinstance(question, dict) and name != "open_image" else question
            reply = post(page, name, keyed)
            assert reply.status_code == 400 and re.fullmatch('{"detail":"expected .*, got .*"}', reply.text), question
    assert post(page, "heatmap", {}, component_id=10**6).text == "expected a question of this page: load it again"
    for bad in ({"index": "\ud800"}, {"index": 10**30}, {"method": "\ud800"}, {"key": "\ud800"}):
        assert post(page, "heatmap", {"key": key} | OF_HEATMAP | bad).json()["error"].count("expected ") == 1


def test_an_upload_is_not_written_to_the_disk(page, tmp_path_factory):
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "PNG")
    upload = {"name": ".png", "data": base64.b64encode(file.getvalue()).decode()}
    opened = post(page, "open_image", upload).json()
    assert opened["name"] == ".png" and len(opened["classes"]) == 5
    assert not any(path.is_file() for path in tmp_path_factory.getbasetemp().joinpath("uploads").rglob("*"))


def test_a_signal_ends_the_server_while_a_method_computes(tmp_path):
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "vit.safetensors")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = f"serve --model test_vit --weights {tmp_path}/vit.safetensors --method RISE(masks=20000) --port {port}"
    command = [sys.executable, "-m", "explainers", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        line = next(line for line in server.stdout if line.startswith("The page is at "))
        url = line.split()[4]
        opened = next(
            reply for number in range(9) if (reply := ask(url, "open_image", {}, component_id=number)).is_success
        )
        question = {"key": opened.json()["key"], "index": 1}
        of_page = {"component_id": json.loads(opened.request.content)["component_id"]}
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(ask, url, "heatmap", question | {"method": "RISE(masks=20000)"}, **of_page)
            ask(url, "scores", question | {"hidden": [[1]]}, **of_page)
            server.send_signal(signal.SIGTERM)
            assert (server.wait(), server.stdout.read(), slow.result().json()) == (0, "", {})
