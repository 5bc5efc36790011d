"""The page of `explainers serve` in a headless Chromium, with a toy model; skipped where there is none."""

import json

import pytest
import timm
from browser import MARKS, start_browser
from clips import random_directions
from PIL import Image

from explainers.app.page import build_app
from explainers.app.page.server import RunningPage
from explainers.app.session import Session
from explainers.text import TextHead

pytest.importorskip("selenium")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = MARKS
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


@pytest.fixture(scope="module")
def address():
    page = RunningPage(build_app(Session(timm.create_model("vit_tiny_patch16_224", **TINY), "GAE")))
    yield page.url
    page.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start_browser(tmp_path_factory.mktemp("profile"), 1000, "browser", "performance")
    yield driver
    driver.quit()


class Page:
    """What a visitor sees and does."""

    def __init__(self, driver, address):
        self.driver = driver
        driver.get(address)
        self.until(lambda: self.all("input[type=file]") and self.all(".opened"))

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def until(self, condition):
        return WebDriverWait(self.driver, 120, 0.03).until(lambda _: condition())

    def texts(self, selector):
        return [element.text for element in self.all(selector)]

    def drop(self, path):
        self.one("input[type=file]").send_keys(str(path))

    def explained(self):
        """The method and class of every heatmap that is drawn."""
        return [canvas.get_attribute("data-shown") for canvas in self.all(".maps canvas")][1:]

    def probabilities(self):
        """The numbers below the tested pictures, once the server has answered."""
        hidden = self.one(".tests canvas").get_attribute("aria-label")
        self.until(lambda: f", {self.one('.tests').get_attribute('data-measured')} patches" in hidden)
        return [float(text.split()[0]) for text in self.texts(".tests .number")]

    def hidden(self, canvas=0):
        """The number of grey patches in a tested picture: those with the mean colour of the toy's normalisation."""
        script = """
            const canvas = document.querySelectorAll(".tests canvas")[arguments[0]], step = canvas.height / 4;
            const left = (canvas.width - canvas.height) / 2; // the model sees the square in the middle
            const at = (i) => [left + ((i % 4) + 0.5) * step, (Math.floor(i / 4) + 0.5) * step, 1, 1];
            const colour = (i) => canvas.getContext("2d").getImageData(...at(i)).data.slice(0, 3).join();
            return [...Array(16).keys()].filter((i) => colour(i) === "128,128,128").length;"""
        return self.driver.execute_script(script, canvas)


@pytest.fixture(scope="module")
def prompting():
    """The address of a page for a model without classes, but with a text head."""
    model = timm.create_model("vit_tiny_patch16_224", **TINY | {"num_classes": 0})
    page = RunningPage(build_app(Session(model, "GAE", text_head=TextHead(random_directions))))
    yield page.url
    page.close()


@pytest.fixture
def photo(tmp_path):
    red = Image.radial_gradient("L").resize((90, 60))
    Image.merge("RGBA", [red, Image.new("L", red.size), red, Image.new("L", red.size, 255)]).save(
        tmp_path / "photo.png"
    )
    return tmp_path / "photo.png"


@pytest.fixture
def page(browser, address, photo):
    page = Page(browser, address)
    page.drop(photo)
    page.until(lambda: page.all(".curve svg circle"))
    yield page
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []


def test_clicks_search_and_comparison(page):
    classes = page.all(".classes button")
    assert len(classes) == 5 and classes[0].get_attribute("aria-pressed") == "true"
    first = page.explained()[0]
    classes[1].click()
    page.until(lambda: page.explained()[0] not in (first, ""))
    wanted = classes[3].get_attribute("data-index")
    search, methods = page.one("#search input"), page.one("#methods input")
    search.send_keys(f"class {wanted}", Keys.ENTER)
    page.until(lambda: page.explained() == [f"GAE {wanted}"])
    for method in ("gradcam", "decompx"):  # parts of other names
        methods.send_keys(method, Keys.ENTER)
    assert page.texts("#methods .chosen button") == ["GAE ✕", "GradCAM ✕", "DecompX ✕"]
    page.all("#methods .chosen button")[1].click()
    page.until(lambda: page.explained() == [f"GAE {wanted}", f"DecompX {wanted}"])
    assert page.texts(".maps .legend") == [
        "grey: not seen by the model",
        f"less important for class {wanted}\nmore important",
        f"speaks against class {wanted}\nno effect\nspeaks for class {wanted}",
    ]
    page.until(lambda: len(page.all(".curve polyline")) == 3)
    assert [text.split("\n")[0] for text in page.texts(".tests figcaption")] == ["chance", "GAE", "DecompX"]


def test_a_class_is_told_apart_from_another_by_a_key(page):
    page.until(lambda: page.explained()[0])
    own, other = (page.one(place).get_attribute("data-index") for place in (".classes button", ".others button"))
    assert page.one(".contrast").text.startswith(f"Why class {own} rather than")
    assert len(page.all(".others button")) == 4
    page.one(".others button").send_keys(Keys.ENTER)
    page.until(lambda: page.explained() == [f"GAE {own},{other}"])
    sentence = f"The probability of class {own} minus that of class {other} while"
    page.until(lambda: page.one(".curve figcaption").text.startswith(sentence))
    assert page.driver.switch_to.active_element.get_attribute("aria-pressed") == "true"
    page.driver.switch_to.active_element.send_keys(" ")
    page.until(lambda: page.explained() == [f"GAE {own}"])


def test_hiding_by_slider_and_by_hand(page):
    slider = page.one(".hidden-count")
    slider.send_keys(Keys.HOME)
    page.until(lambda: page.hidden() == 0 and len(set(page.probabilities())) == 1)
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.until(lambda: page.hidden() == page.hidden(1) == 2)
    page.one(".tests canvas").click()  # a patch in the middle
    assert page.one("[value=painted]").is_selected()
    page.until(lambda: page.texts(".tests .name") == ["your patches"] and page.hidden() in (1, 3))
    painted = page.hidden()
    page.one(".tests canvas").send_keys(Keys.ARROW_LEFT, " ")
    page.until(lambda: page.hidden() in (painted - 1, painted + 1))
    page.one(".clear").click()
    page.until(lambda: page.hidden() == 0)
    canvas = page.one(".tests canvas")
    outside = ActionChains(page.driver).move_to_element_with_offset(canvas, 8 - canvas.rect["width"] // 2, 0)
    outside.click().move_to_element(canvas).click().perform()
    page.until(lambda: page.hidden() == 1)  # what the model does not see has no patches


def test_a_phone_shows_the_result_below_the_photo(page, browser):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page.until(lambda: browser.execute_script("return document.documentElement.scrollWidth") == 390)
        script = """
            const targets = [...document.querySelectorAll(".opened :is(button, label, input[type=range], canvas)")];
            const sizes = targets.filter((each) => each.offsetParent).map((each) => each.getBoundingClientRect());
            return Math.min(...sizes.map(({ width, height }) => Math.min(width, height)));"""
        assert browser.execute_script(script) >= 24
        tops = [page.one(place).rect["y"] for place in (".photo", ".opened", ".maps", ".choices")]
        assert tops == sorted(tops) and tops[1] < 250 and tops[2] < 450
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_broken_file_is_told_in_one_line_and_the_last_heatmaps_leave(page, tmp_path, capfd):
    name = ".png"
    (tmp_path / name).write_bytes(b"\x89PNG no")
    page.drop(tmp_path / name)
    message = page.until(lambda: page.one(".message.error").text)
    assert message == f"{name}: expected an image, got 7 bytes that cannot be decoded (unknown format)"
    assert not page.one(".opened").is_displayed() and "Error" not in page.one("body").text
    assert capfd.readouterr() == ("", "")


def test_no_other_server_is_asked(page, browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    hosts = {url.split("/")[2].split(":")[0] for url in urls if url.startswith(("http", "ws"))}
    assert hosts == {"127.0.0.1"}


def test_texts_are_typed_and_stay_listed(browser, prompting, photo):
    page = Page(browser, prompting)
    page.drop(photo)
    page.until(lambda: page.one(".prompt").is_displayed())
    assert page.all(".classes button") == [] and not page.one(".explained").is_displayed()
    page.one(".prompt").send_keys("a cat", Keys.ENTER)
    page.until(lambda: page.explained() == ['GAE "a cat"'])
    page.one(".prompt").send_keys("a dog", Keys.ENTER)
    page.until(lambda: page.explained() == ['GAE "a dog"'] and page.all(".curve svg circle"))
    names = page.texts(".classes button")
    assert len(names) == 2 and {name.split("\n")[0][:5] for name in names} == {"a cat", "a dog"}
    page.one(".others button").click()
    page.until(lambda: page.explained() == ['GAE "a dog","a cat"'])
    page.one(".classes [aria-pressed=false]").click()
    page.until(lambda: page.explained() == ['GAE "a cat"'])
    page.drop(photo)
    page.until(lambda: len(page.all(".classes button")) == 2 and page.explained()[0])
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []


def test_two_images_side_by_side(page, browser, photo, tmp_path):
    Image.open(photo).rotate(90).save(tmp_path / "other.png")
    page.all("input[type=file]")[-1].send_keys(str(tmp_path / "other.png"))
    page.until(lambda: page.one(".alike").is_displayed() and page.one(".likeness").text.startswith("Similarity "))
    assert page.texts(".pair .name") == ["photo.png", "other.png"]
    assert page.texts(".pair .legend") == ["unlike the other\n0\nlike the other"] * 2
    first, second = page.all(".pair canvas")
    first.click()
    patch = page.until(lambda: second.get_attribute("data-lit"))
    assert page.one(".likeness").text.startswith("This patch adds ")
    first.send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: second.get_attribute("data-lit") == str(int(patch) + 1))
    second.send_keys(Keys.ARROW_DOWN)
    page.until(lambda: first.get_attribute("data-lit") and not second.get_attribute("data-lit"))
