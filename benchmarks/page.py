"""Time from a click to the picture on the page of `explainers serve`, measured in a headless Chromium.

    python benchmarks/page.py docs/photos/cat_and_coffee.jpg --weights vit_tiny.safetensors
    python benchmarks/page.py photo.jpg --model test_vit --random --method GAE

The time starts with the click on a class that was not shown before, and ends when its heatmap is drawn on the canvas.
The browser runs on the same machine as the server, and takes its share of the cores.
"""

import argparse
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from explainers.app.page import serve

FLAGS = "headless=new no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-background-networking"
PAUSE = 1.5
"""Seconds between two clicks, in which the curves of the last one are computed."""

WAIT = """
    const [act, done] = [arguments[0], arguments[arguments.length - 1]], start = performance.now();
    const ready = new Function("at", arguments[1]), at = arguments[2];
    const look = () => ready(at) ? requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)))
                                 : requestAnimationFrame(look);
    new Function("at", act)(at);
    look();"""
CLASS = """
    const field = document.querySelector("#search input"), names = document.querySelectorAll("#search option");
    Object.assign(field, { value: names[at].value }).dispatchEvent(new Event("input"));"""
DRAWN = "return document.querySelector('.maps figure:nth-child(2) canvas')?.dataset.shown.endsWith(' ' + at)"
SLIDE = "const s = document.querySelector('.hidden-count'); s.value = at; s.dispatchEvent(new Event('input'))"
COUNTED = "return document.querySelector('.tests').dataset.measured == at"


def browser() -> Any:
    """A headless Chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


def times(page: Any, act: str, ready: str, values: list[int]) -> list[float]:
    """Milliseconds from each action to the frame in which it is drawn."""
    found = []
    for value in values:
        found.append(page.execute_async_script(WAIT, act, ready, value))
        time.sleep(PAUSE)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--weights")
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=7899)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = timm.create_model(options.model) if options.random else options.model
    server = serve(model, options.weights, options.method, port=options.port, block=False)
    page = browser()
    try:
        page.get(server.local_url)
        page.implicitly_wait(60)
        page.find_element("css selector", "input[type=file]").send_keys(str(options.image.resolve()))
        page.find_element("css selector", ".curve circle")
        count = page.execute_script("return document.querySelector('.hidden-count').max")
        known = int(re.findall(r"Search all (\d+) classes", page.page_source)[0])
        classes = torch.randperm(known, generator=torch.Generator().manual_seed(0))[: options.rounds].tolist()
        for name, found in {
            "click to heatmap": times(page, CLASS, DRAWN, classes),
            "slider to probability": times(page, SLIDE, COUNTED, list(range(1, int(count) - 1, 1))[-options.rounds :]),
        }.items():
            longest = sorted(found)[int(0.9 * len(found))]
            print(f"{name}: median {statistics.median(found):.0f} ms, 90 % below {longest:.0f} ms, {len(found)} times")
    finally:
        page.quit()
        server.close()


if __name__ == "__main__":
    main()
