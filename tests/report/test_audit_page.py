import base64
import re

import pytest
import torch
from browser import content

from explainers.auditing.audit import SUSPICIOUS, Audit, Effect, Example, Group
from explainers.auditing.groups import Centres
from explainers.report.audit_page import audit_html, summarise_audit

NASTY = '</script><b> & "q" \'é'
ABOUT = {"model": "tiny", "command": ["explainers", "audit", "my pets", "--model", "it's"], "versions": {"torch": "2"}}
WRONG, RIGHT = Example(7, "wrong.png", 0, 1, (3, 0)), Example(2, "right.png", 1, 1, (1,))


def group(index=0, **changes):
    numbers = dict.fromkeys(("share", "image_share", "accuracy_with", "exclusive", "suspicion"), 0.75)
    known = {"class_index": 1, "images": 3, "accuracy_without": None, "positions": ((0.5, 0.1), (0.0, 0.4))}
    effects = {"hidden": Effect(1.0, 0.5, 4), "random": None, "flipped": 1 / 3, "off_object": None, "sources": None}
    shown = {"places": {"corner": 1.0}, "reasons": ("it is exclusive",), "examples": (WRONG,), "without": (RIGHT,)}
    return Group(**{"index": index, **numbers, **known, **effects, **shown, **changes})


def audit(*groups, **changes):
    known = {"classes": ["cat", "dog"], "numbers": {"images": 1200, "accuracy": 0.875}, "about": ABOUT}
    centres = Centres(torch.ones(len(groups), 1), torch.tensor([each.class_index for each in groups]))
    return Audit(**{"groups": [*groups], "shape": (2, 2), "centres": centres, **known, **changes})


def photos(*numbers):
    return {number: torch.randint(256, (3, 8, 8), dtype=torch.uint8) for number in numbers}


def test_names_cannot_end_the_data_or_become_markup_and_the_page_forbids_the_network():
    example = Example(7, NASTY, 0, 1, (0,))
    nasty = group(examples=(example,), reasons=(NASTY,), texts={NASTY: 0.5})
    page = audit_html(audit(nasty, classes=[NASTY, NASTY], about=ABOUT | {NASTY: NASTY}), photos(7))
    assert page.isascii() and page.count("</script") == 2 and "<b>" not in page
    data = content(page)
    [shown] = data["groups"]
    image = data["images"][0]["name"]
    assert {*data["classes"], image, *shown["reasons"], *shown["texts"], *data["notes"][3]} == {NASTY}
    assert "content=\"default-src 'none'; img-src data:; " in page
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|@import|url\(", page)


def test_a_photo_is_stored_once_and_examples_without_a_photo_are_left_out():
    groups = [group(0), group(1, examples=(WRONG, RIGHT), without=(Example(5, "no photo", 1, 1),))]
    data = content(audit_html(audit(*groups), photos(2, 7, 9)))
    images = [(each["name"], each["label"], each["predicted"]) for each in data["images"]]
    assert images == [("wrong.png", 0, 1), ("right.png", 1, 1)]
    assert [[each["image"] for each in one["examples"]] for one in data["groups"]] == [[0], [0, 1]]
    assert [[each["image"] for each in one["without"]] for one in data["groups"]] == [[1], []]
    unmeasured = content(audit_html(audit(groups[0], group(1, hidden=None)), {}))
    assert [one["alarm"] for one in unmeasured["groups"]] == [True, False]
    assert data["groups"][0]["examples"][0]["patches"] == [3, 0]
    bare = content(audit_html(audit(*groups), {}))
    assert bare["images"] == [] and bare["groups"][0]["examples"] == [] and bare["groups"][0]["share"] == 0.75


def test_numbers_are_rounded_and_those_that_are_not_finite_are_none():
    one = group(
        share=1 / 3, hidden=Effect(2 / 3, float("nan"), 1), accuracy_with=float("nan"), places={"corner": float("inf")}
    )
    [shown] = content(audit_html(audit(one), {}))["groups"]
    assert (shown["share"], shown["accuracy_with"], shown["places"]) == (0.3333, None, {"corner": None})
    assert shown["effects"] == [{"mean": 0.6667, "error": None, "images": 1}, None]
    assert [*base64.b64decode(shown["positions"])] == [255, 51, 0, 204]


def test_the_command_is_quoted_and_all_that_the_result_depends_on_is_listed():
    data = content(audit_html(audit(), {}))
    assert data["command"] == """explainers audit 'my pets' --model 'it'"'"'s'"""
    assert ["versions", '{"torch": "2"}'] in data["notes"] and ["accuracy", "0.875"] in data["notes"]
    assert data["measured"] == "1,200 images, 87.5% are predicted right."


SENTENCES = {
    (): "0 groups in 0 classes; no group is suspicious.",
    ((1, 0.34), (0, 0.0)): "2 groups in 2 classes; no group is suspicious: the most is 0.34, of group 0.",
    ((1, SUSPICIOUS),): "1 group in 1 class; 1 is suspicious: group 0 of b.",
    (
        (1, 0.9),
        (0, 0.8),
        (1, 0.7),
        (1, 0.6),
        (0, 0.0),
    ): "5 groups in 2 classes; 4 are suspicious: groups 0, 2 and 3 of b; group 1 of a.",
    tuple((y, 0.9) for y in range(6)): "6 groups in 6 classes; 6 are suspicious: group 0 of a; group 1 of b;"
    " group 2 of c; group 3 of d; and those of 2 more classes.",
}
"""Class and suspicion of each group → what is said."""


@pytest.mark.parametrize("pairs", SENTENCES, ids=len)
def test_the_sentence_names_the_suspicious_groups(pairs):
    groups = [group(i, class_index=y, suspicion=suspicion) for i, (y, suspicion) in enumerate(pairs)]
    assert summarise_audit(audit(*groups, classes=[*"abcdef"])) == SENTENCES[pairs]
