"""What the server of the page answers, to whom, and that computations end when nobody waits for them."""

import asyncio
import base64
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
import timm
import torch
from conftest import timm_model
from fork_server import PATIENCE
from PIL import Image
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.routing import Mount
from torch.nn.modules.module import register_module_forward_pre_hook

from explainers.app.page import build_app
from explainers.app.page.api import LARGEST_BODY, MOST_BODIES, Abandoned, stop_when
from explainers.app.page.guard import Guard
from explainers.app.page.server import RunningPage
from explainers.app.session import Session
from explainers.auditing.audit import Audit
from explainers.auditing.groups import Centres
from explainers.errors import InputError
from explainers.posthoc import build
from explainers.posthoc.names import build_supported

CLIENT = httpx.Client(timeout=600)
"""One for all questions: each new one reads the certificates of the machine."""

BEGUN = threading.Event()
"""Set once `Slow` computes."""


class Slow:
    """Explains by endless passes of the model: who waits for its end waits for ever."""

    def __init__(self, target):
        self.target = target

    def __call__(self, images, classes=None):
        while True:
            self.target(images)
            BEGUN.set()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    audit = tmp_path_factory.mktemp("audit")
    found = Audit([], [], {}, (1, 1), {}, Centres(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long)))
    found.save(audit)
    (audit / "audit.html").write_text(f'<p>groups</p>"id":"{found.id}"')
    page = RunningPage(build_app(Session(timm_model(), "GAE"), audit))
    yield page
    page.close()


def ask(url, name, question, **options):
    body, headers = json.dumps({"name": name, "question": question}), {"content-type": "application/json"}
    return CLIENT.post(f"{url}api", content=body, headers=headers, **options)


def test_a_port_in_use_is_told_in_one_line(page, target):
    port = int(page.url.split(":")[2].strip("/"))
    with pytest.raises(InputError, match=rf"expected a free port .*, got 127\.0\.0\.1:{port}, .* --port 7861"):
        RunningPage(build_app(Session(target, "Chance")), port=port)


def test_the_routes_that_are_answered(page):
    found = {
        (method, path): CLIENT.request(method, page.url + path).status_code
        for method in ("GET", "POST")
        for path in ("", "api", "audit", "audit/results.json", "static/page.js", "static/../api.py", "api.py", "docs")
    }
    answered = {asked: status for asked, status in found.items() if status not in (404, 405)}
    assert answered == {("GET", ""): 200, ("GET", "audit"): 200, ("GET", "static/page.js"): 200, ("POST", "api"): 415}


def test_the_page_of_an_audit_is_in_a_tab_of_a_server_that_has_one(page, target, tmp_path):
    session = Session(target, "Chance")
    assert CLIENT.get(f"{page.url}audit").text.startswith("<p>groups</p>")
    assert '<div role="tablist" >' in CLIENT.get(page.url).text
    assert "/audit" not in [route.path for route in build_app(session).routes]
    with pytest.raises(InputError, match=f"^expected the folder of an audit, got {tmp_path} without"):
        build_app(session, tmp_path)


def test_an_app_of_others_mounts_the_page(target):
    async def visit(path):
        transport = httpx.ASGITransport(Starlette(routes=[Mount("/explain", build_app(Session(target, "Chance")))]))
        async with httpx.AsyncClient(transport=transport, base_url="http://app", follow_redirects=True) as client:
            return await client.get(path)

    page = asyncio.run(visit("/explain"))
    assert page.url.path == "/explain/" and 'src="static/page.js"' in page.text  # relative to it
    assert asyncio.run(visit("/explain/static/page.js")).status_code == 200


def test_names_cannot_end_the_data_of_the_page(target):
    target.classes = ["</script><b>", "cat", "dog", "bird", "cow"]
    html = next(iter(build_app(Session(target, "Chance")).routes)).app.body.decode()
    data = re.search('<script id="data" type="application/json">(.*?)</script>', html)[1]
    assert json.loads(data)["classes"][0] == "</script><b>"


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
    reply = CLIENT.get(page.url, headers=headers)
    assert reply.status_code == status and (status == 200 or len(reply.text.splitlines()) == 1)


def test_a_name_of_the_user_and_a_public_page_are_let_in():
    def lets_in(domain=None, host="127.0.0.1:7860", **headers):
        return Guard(None, "0.0.0.0", domain).refuse({"host": host} | headers) is None

    site = {"host": "my.example", "origin": "https://my.example"}
    assert not lets_in(**site) and lets_in("my.example", **site) and lets_in("*", **site)
    assert lets_in("My.Example", origin="https://my.example")  # a proxy that passes its own address on
    assert not lets_in("my.example", host="evil.example")
    assert not lets_in("my.example", origin="https://evil.example")
    assert lets_in(origin="http://127.0.0.1:7860")


def test_questions_are_json_and_take_a_limited_memory(page):
    """Also one that does not tell its length."""
    pieces = (b" " * 2**20 for _ in range(LARGEST_BODY // 2**20 + 1))
    for content, kind, status in ((b"{}", "text/plain", 415), (pieces, "application/json", 413)):
        reply = CLIENT.post(f"{page.url}api", content=content, headers={"content-type": kind})
        assert reply.status_code == status and reply.text.startswith("expected ")
    assert MOST_BODIES >= 2 * LARGEST_BODY


OF_HEATMAP = {"method": "GAE", "index": 0}
MALFORMED = {
    "open_image": [[], "x", None, {"data": 3}, {"data": ["x"]}, {"name": 3}, {"file": ""}],
    "heatmap": [
        *({}, {"index": 0}, {"key": "x"}, OF_HEATMAP | {"self": 1}, OF_HEATMAP | {"image": ["x"]}),
        *(OF_HEATMAP | {"method": each} for each in (["GAE"], None)),
        *(OF_HEATMAP | {"index": each} for each in ([0], 1.5, True)),
        *(OF_HEATMAP | {"against": each} for each in (1, [[1]], {"1": 1})),
    ],
    "curves": [{"methods": each, "index": 0, "side": "most"} for each in ("GAE", [3])],
    "scores": [{"index": 0, "hidden": each} for each in ([3], [["1"]], [[True]], None)],
    "prompts": [{"texts": each} for each in ("cat", [3])],
    "picture": [{"methods": ["GAE"], "index": 0, "smooth": "yes"}],
    "alike": [{"other": ["x"]}, {"other": None}, {}],
    "other": [{}],
}


def test_malformed_questions_are_refused_in_one_line(page):
    image = ask(page.url, "open_image", {}).json()["key"]
    assert "tiles" in ask(page.url, "heatmap", OF_HEATMAP | {"image": image}).json()
    for name, questions in MALFORMED.items():
        for question in questions:
            keyed = {"image": image} | question if isinstance(question, dict) and name != "open_image" else question
            reply = ask(page.url, name, keyed)
            assert reply.status_code == 400 and re.fullmatch("expected .*, got .*", reply.text), question
    for body in (b"", b"[]", b"\xff", b'{"name": []}', b"[" * 10**5):
        reply = CLIENT.post(f"{page.url}api", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and re.fullmatch("expected .*, got .*", reply.text)
    for bad in ({"index": "\ud800"}, {"index": 10**30}, {"method": "\ud800"}, {"image": "\ud800"}):
        assert ask(page.url, "heatmap", {"image": image} | OF_HEATMAP | bad).json()["error"].count("expected ") == 1


def test_an_upload_is_opened(page):
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "PNG")
    upload = {"name": ".png", "data": base64.b64encode(file.getvalue()).decode()}
    opened = ask(page.url, "open_image", upload).json()
    assert opened["name"] == ".png" and len(opened["classes"]) == 5


def test_a_computation_ends_when_its_visitor_leaves_and_when_the_server_closes(target):
    session = Session(target, Slow(target))
    page = RunningPage(build_app(session))
    image = ask(page.url, "open_image", {}).json()["key"]
    question = {"image": image, "index": 0}
    with pytest.raises(httpx.ReadTimeout):
        ask(page.url, "heatmap", question | {"method": session.method}, timeout=0.5)
    assert "tiles" in ask(page.url, "heatmap", question | {"method": "GAE"}).json()
    BEGUN.clear()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(ask, page.url, "heatmap", question | {"method": session.method})
        assert BEGUN.wait(PATIENCE)
        waiting = pool.submit(ask, page.url, "heatmap", question | {"method": "GAE"})
        page.close()
        with suppress(httpx.ConnectError, httpx.RemoteProtocolError):  # it may have come after the end
            assert waiting.result().status_code == 503
        assert slow.result().status_code == 503


FEW = {"RISE": {"masks": 20}, "LIME": {"samples": 20}}


@pytest.mark.slow
def test_a_computation_that_ends_early_leaves_the_model_as_it_was(target, images):
    """In its middle, for all methods of a ViT."""
    question = images[:1], torch.tensor([1])
    for name in build_supported(target):
        explainer, calls = build(name, target, target.grid, FEW.get(name)), []
        with register_module_forward_pre_hook(lambda *_, calls=calls: calls.append(1)):
            expected = explainer(*question)
        stays = iter([False] * (1 + len(calls) // 2))
        with suppress(Abandoned), stop_when(lambda stays=stays: next(stays, True)):
            explainer(*question)
        torch.testing.assert_close(explainer(*question), expected)


@pytest.mark.slow
def test_a_signal_ends_the_server_while_a_method_computes(tmp_path):
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "vit.safetensors")
    method = "RISE(masks=4000)"
    words = f"serve --model test_vit --weights {tmp_path}/vit.safetensors --method {method} --port 0"
    command = [sys.executable, "-m", "explainers", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        line = next(line for line in server.stdout if line.startswith("The page is at "))
        image = ask(url := line.split()[4], "open_image", {}).json()["key"]
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(ask, url, "heatmap", {"image": image, "index": 1, "method": method})
            CLIENT.get(url)
            server.send_signal(signal.SIGTERM)
            assert (server.wait(), server.stdout.read(), slow.result().status_code) == (0, "", 503)
