"""The page of `explainers serve` under attack: memory and disk under hostile files, waits beside slow methods.

    python benchmarks/page_attack.py docs/photos/cat_and_coffee.jpg --weights vit_tiny.safetensors

400 uploads come from eight threads, in turn: a PNG of 177 megapixels, one of 1 x 170 million pixels, a JPEG of 48 and a
PNG of 12 megapixels, the last two different each time. Then twenty visitors ask for RISE (4000 passes) on an image
each, while another one clicks classes, one after the other; then the twenty leave.
"""

import argparse
import base64
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
UPLOADS, VISITORS, CLICKS = 400, 20, 20


class Visitor:
    """A browser: it asks the functions of the page."""

    def __init__(self, port: int) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        self.component = int(re.findall(r'"id":(\d+),"type":"html"', self.client.get("/").text)[0])

    def ask(self, function: str, /, **question: Any) -> dict[str, Any]:
        """The reply of a function of the page."""
        body = {"component_id": self.component, "session_hash": "attack", "fn_name": function, "data": question}
        return self.client.post("/gradio_api/component_server/", json=body).json()

    def open(self, name: str, data: bytes) -> dict[str, Any]:
        """The reply to an upload."""
        return self.ask("open_image", name=name, data=base64.b64encode(data).decode())


def encode(image: Image.Image, kind: str) -> bytes:
    """An image file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def vary(file: bytes, number: int, kind: str) -> bytes:
    """Another file with the same pixels: bytes after the end of an image are ignored."""
    return file + number.to_bytes(4, "big") if kind == "JPEG" else file + b"%d" % number


def memory(process: subprocess.Popen[str], of: str = "VmRSS") -> int:
    """Memory of a process in MB: `VmRSS` now, `VmHWM` at its highest."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return int(re.findall(rf"{of}:\s+(\d+) kB", status)[0]) // 1024


def flood(port: int, process: subprocess.Popen[str], folder: Path) -> None:
    """Print what hostile uploads cost."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    files = {
        "177 megapixels": (encode(Image.new("RGB", (13300, 13300)), "PNG"), "PNG"),
        "1 x 170,000,000": (encode(Image.new("1", (1, 170_000_000)), "PNG"), "PNG"),
        "48 megapixels": (encode(noise.resize((8000, 6000)), "JPEG"), "JPEG"),
        "12 megapixels": (encode(noise.resize((4000, 3000), Image.Resampling.NEAREST), "PNG"), "PNG"),
    }
    print("files:", ", ".join(f"{name} {len(file) / 1000:.0f} kB" for name, (file, _) in files.items()))
    before, start = memory(process), time.perf_counter()
    visitors = [Visitor(port) for _ in range(8)]
    names = list(files)

    def upload(number: int) -> str:
        name = names[number % len(names)]
        reply = visitors[number % len(visitors)].open(name, vary(files[name][0], number, files[name][1]))
        return f"{name}: {reply.get('error', 'opened')}"

    with ThreadPoolExecutor(len(visitors)) as threads:
        replies = list(threads.map(upload, range(UPLOADS)))
    for reply in dict.fromkeys(replies):
        print(f"  {replies.count(reply)} x {reply}")
    left = sum(path.is_file() for path in folder.rglob("*"))
    print(f"  {UPLOADS} uploads in {time.perf_counter() - start:.0f} s; files on the disk: {left}")
    print(f"  memory: {before} MB before, at most {memory(process, 'VmHWM')} MB, {memory(process)} MB after")


def longest_wait(port: int, image: bytes) -> str:
    """The waits of a visitor who clicks classes, as text."""
    visitor = Visitor(port)
    key = visitor.open("clicked.jpg", image)["key"]
    waits = []
    for index in range(CLICKS):
        start = time.perf_counter()
        visitor.ask("heatmap", key=key, method="AnyHead", index=index)
        waits.append(time.perf_counter() - start)
    start = time.perf_counter()
    visitor.ask("curves", key=key, methods=["AnyHead"], index=0, side="most")
    curve = time.perf_counter() - start
    return f"click to heatmap: median {np.median(waits):.2f} s, longest {max(waits):.2f} s; a curve {curve:.2f} s"


def crowd(port: int, process: subprocess.Popen[str], photo: Image.Image) -> None:
    """Print the waits of a visitor alone, beside twenty with a slow method, and once they have left."""
    print("alone:", longest_wait(port, encode(photo, "PNG")))
    visitors = [Visitor(port) for _ in range(VISITORS)]
    keys = [
        visitor.open("slow.jpg", vary(encode(photo, "JPEG"), number, "JPEG"))["key"]
        for number, visitor in enumerate(visitors)
    ]

    def leave(visitor: Visitor, key: str) -> None:
        visitor.client.timeout = 60
        try:
            visitor.ask("heatmap", key=key, method="RISE", index=0)
        except httpx.ReadTimeout:
            visitor.client.close()

    with ThreadPoolExecutor(VISITORS) as threads:
        slow = [threads.submit(leave, visitor, key) for visitor, key in zip(visitors, keys, strict=True)]
        time.sleep(5)
        print(f"beside {VISITORS}:", longest_wait(port, encode(photo.rotate(90), "PNG")), f"; {memory(process)} MB")
        finished = sum(each.done() for each in slow)
    time.sleep(2)
    spent = cpu_time(process)
    time.sleep(5)
    print(f"after they left ({finished} were done): {(cpu_time(process) - spent) / 5:.0%} of a core is busy")


def cpu_time(process: subprocess.Popen[str]) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("--weights", required=True, help="of ViT-Tiny")
    parser.add_argument("--port", type=int, default=7898)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *["-m", "explainers", "serve", "--weights"], options.weights]
        command += ["--port", str(options.port)]
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and "The page is at" in server.stdout.readline()
            try:
                flood(options.port, server, Path(folder))
                crowd(options.port, server, Image.open(options.image))
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
