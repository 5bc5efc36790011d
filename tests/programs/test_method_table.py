"""docs/methods.md names every method without training."""

import re

from commands import ROOT

from explainers.posthoc import method_names


def test_every_method_has_a_place_in_the_table():
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs/methods.md").read_text()))
    assert set(method_names()) - named - {"Chance"} == set()
