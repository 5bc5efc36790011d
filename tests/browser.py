"""A headless Chromium for tests of pages; they are skipped where there is none."""

import json
import re
import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium or its driver is not installed: make browser"),
]
FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic disable-dev-shm-usage no-first-run disable-background-networking"
    " disable-component-update disable-sync"
)


def start_browser(profile, height, *logs):
    """Start a browser with an empty profile folder, a window 1200 pixels wide, and the named logs."""
    from selenium import webdriver  # not everybody has it

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"window-size=1200,{height}", f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", dict.fromkeys(logs, "ALL"))
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))


def content(page):
    """What the script of a page in one file reads."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
