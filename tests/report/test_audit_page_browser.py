"""The page of `audit_html` in a headless Chromium; this test is skipped where there is none."""

import pytest
from browser import MARKS, start_browser
from test_audit_page import NASTY, RIGHT, audit, group, photos

from explainers.auditing.audit import SUSPICIOUS
from explainers.report.audit_page import audit_html

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

pytestmark = MARKS


def test_a_person_looks_at_a_group_and_gets_the_command_that_takes_it_out(tmp_path):
    groups = [group(0), group(1, class_index=0, share=0.9, suspicion=0.1, reasons=(NASTY,))]
    groups.append(group(2, suspicion=0.0, share=0.1, examples=(), without=()))
    (tmp_path / "audit.html").write_text(audit_html(audit(*groups), photos(2, 7)))
    page = start_browser(tmp_path / "profile", 900, "browser")

    def texts(selector):
        return [each.text for each in page.find_elements(By.CSS_SELECTOR, selector)]

    def opened(name):
        WebDriverWait(page, 120, 0.02).until(lambda _: texts("#which") == [name])

    def press(*keys):
        page.switch_to.active_element.send_keys(*keys)

    try:
        page.get((tmp_path / "audit.html").as_uri())
        assert texts("h2")[:3] == ["Group 0: dog", "Group 1: cat", "Group 2: dog"]
        assert texts("#groups > *")[1] == f"Not suspicious: below {SUSPICIOUS}, or not measured"
        assert texts(".suspicious h2") == ["Group 0: dog"]
        assert texts("article:last-child h2 a, b") == []  # no photos to open, no markup of names
        page.find_element(By.CSS_SELECTOR, "article svg").click()
        opened("Group 0: dog")
        assert texts("dialog h3") == [
            "With the group1 photo, 1 predicted wrong",
            "Without it, or with little of it1 photo",
        ]
        assert texts("dialog figcaption") == ["cat, taken for dog\nwrong.png", f"dog\n{RIGHT.name}"]
        press(Keys.ARROW_RIGHT)
        assert texts("#which") == ["Group 1: cat"] and texts("dialog li") == [NASTY]
        page.find_element(By.CSS_SELECTOR, "dialog .take input").click()
        press(Keys.ESCAPE)
        assert texts("#which") == [""] and page.switch_to.active_element.text == "Group 1: cat"
        press(Keys.ARROW_UP, Keys.ENTER)
        opened("Group 0: dog")
        page.find_element(By.ID, "close").click()
        page.find_element(By.CSS_SELECTOR, "article .take input").click()
        assert texts("#command") == ["""explainers audit 'my pets' --model 'it'"'"'s' --without 0 1"""]
        Select(page.find_element(By.ID, "order")).select_by_value("share")
        assert texts("article h2") == ["Group 1: cat", "Group 0: dog", "Group 2: dog"]
        Select(page.find_element(By.ID, "class")).select_by_value("1")
        assert texts("article h2") == ["Group 0: dog", "Group 2: dog"] and texts("#found") == ["1 of 2 suspicious"]
        assert page.get_log("browser") == []
    finally:
        page.quit()
