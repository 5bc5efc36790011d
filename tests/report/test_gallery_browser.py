"""The page of `gallery_html` in a headless Chromium; these tests are skipped where there is none."""

import pytest
import torch
from browser import MARKS, start_browser

from explainers.metrics.pairs import paired_differences
from explainers.report.gallery import Picture, gallery_html
from explainers.report.overlays import fade, overlay

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

pytestmark = MARKS
GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.randint(256, (3, 32, 32), generator=GENERATOR, dtype=torch.uint8)
TVE, TVE_DOG, GAE = torch.randn(3, 4, 5, generator=GENERATOR)
TRUTH = torch.zeros(32, 32, dtype=torch.bool)
TRUTH[8:20, 4:30] = True
NASTY = '<b>dog</b></script> & "q"'
COLUMNS = {"fidelity_plus": "Fidelity⁺ ↑", "fidelity_minus": "Fidelity⁻ ↓", "pointing_game": "Hit rate ↑"}


def numbers(plus, minus, **more):
    curves = {"fidelity_plus_curve": [0.0, plus, 0.5], "fidelity_minus_curve": [0.5, minus, 0.0]}
    return {"sparsity": [0.0, 0.5, 1.0], "fidelity_plus": plus, "fidelity_minus": minus} | curves | more


RESULTS = {
    "pets": {
        "light": numbers(0.5, 0.2, fidelity_plus_error=0.01),
        "gae": numbers(0.75, 0.25, pointing_game=0.5),
        "chance": numbers(0.25, 0.125, pointing_game=0.75),
    },
    "cars": {"light": numbers(0.375, 0.3)},
}


EACH = torch.tensor([[1.0, 2.0], [3.0, 4.5], [2.0, 3.0], [5.0, 6.5]])  # four images of two explainers
PAIRS = {"pets": {"fidelity_plus": (["light", "gae"], paired_differences(EACH))}}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    driver = start_browser(folder / "profile", 900, "browser")
    classes, maps = {"cat": 0.9, NASTY: 0.1}, {"light": {"cat": TVE, NASTY: TVE_DOG}, "gae": {"cat": GAE}}
    signed = {"light": True, "gae": False}
    pets = [Picture(f"{number}.png", IMAGE, NASTY, classes, maps, TRUTH, signed) for number in range(15)]
    cars = [Picture("car.png", IMAGE.flip(0), None, {"van": 1.0}, {"light": {"van": TVE_DOG}}, None, signed)]
    page = gallery_html(NASTY, {"pets": pets, "cars": cars}, RESULTS, COLUMNS, ["a note", NASTY], PAIRS)
    (folder / "gallery.html").write_text(page)
    driver.address = (folder / "gallery.html").as_uri()
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """The page as it opens; afterwards there must be no messages in the console."""
    browser.get(browser.address)
    WebDriverWait(browser, 120, 0.02).until(lambda _: shown(browser, 2) is not None)
    yield browser
    assert browser.get_log("browser") == []


def find(page, selector):
    return page.find_element(By.CSS_SELECTOR, selector)


def texts(page, selector):
    return [element.text for element in page.find_elements(By.CSS_SELECTOR, selector)]


def shown(page, position, where="article"):
    """The pixels (3, H, W) on a canvas of the first image, or of the dialog, once all is painted; `None` without."""
    script = """
        const done = arguments[2];
        const canvas = document.querySelector(arguments[0]).querySelectorAll("canvas")[arguments[1]];
        requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => {
            if (!canvas.width || !canvas.height) return done(null);
            const copy = new OffscreenCanvas(canvas.width, canvas.height), context = copy.getContext("2d");
            context.drawImage(canvas, 0, 0);
            const { data } = context.getImageData(0, 0, copy.width, copy.height);
            done({ data: Array.from(data), size: [copy.height, copy.width, 4] });
        })));"""
    found = page.execute_async_script(script, where, position)
    return found and torch.tensor(found["data"]).view(found["size"]).permute(2, 0, 1)[:3]


def assert_alike(found, wanted, tolerance=4):  # shades have 127 steps
    assert (found - wanted.int()).abs().max() <= tolerance


def test_canvases_show_the_image_and_the_overlays_of_the_library(page):
    assert torch.equal(shown(page, 0), IMAGE.long())
    assert_alike(shown(page, 1), overlay(IMAGE, TVE))
    assert_alike(shown(page, 2), overlay(IMAGE, GAE, signed=False))
    find(page, "#opacity").send_keys(Keys.END)
    assert_alike(shown(page, 1), overlay(IMAGE, TVE, opacity=1))
    find(page, "#opacity").send_keys(Keys.HOME)
    assert_alike(shown(page, 1), fade(IMAGE), tolerance=1)


def test_canvases_show_sharp_patches_the_outline_of_the_object_and_another_class(page):
    find(page, "#smooth").click()
    assert_alike(shown(page, 1), overlay(IMAGE, TVE, smooth=False, signed=True), tolerance=2)
    find(page, "article .classes button:last-child").click()
    assert_alike(shown(page, 1), overlay(IMAGE, TVE_DOG, smooth=False), tolerance=2)
    assert texts(page, "article:first-child figcaption") == ["image", "light", "gae\nexplains cat only"]
    find(page, "#outline").click()
    rim = TRUTH.clone()
    rim[9:19, 5:29] = False
    lime = (shown(page, 0) == torch.tensor([0, 255, 0]).view(3, 1, 1)).all(0)
    assert torch.equal(lime, rim)


def test_names_are_text_and_images_out_of_sight_are_not_painted(page):
    find(page, "#notes summary").click()
    assert (page.title, find(page, "h1").text, texts(page, "#notes p")) == (NASTY, NASTY, ["a note", NASTY])
    assert find(page, ".label").text == f"label: {NASTY}"
    assert page.find_elements(By.TAG_NAME, "b") == []
    script = "return [...document.querySelectorAll('article canvas:first-of-type')].filter((each) => each.width).length"
    assert 3 <= page.execute_script(script) < 36  # of 45


def test_a_hidden_explainer_vanishes_from_images_table_and_curves(page):
    assert len(page.find_elements(By.CSS_SELECTOR, ".line")) == 6
    find(page, "#explainers summary").click()
    find(page, "#boxes label:first-child").click()
    assert find(page, "#explainers summary").text == "Explainers 2 of 3"
    assert texts(page, "article:first-child figcaption") == ["image", "", "gae"]
    assert texts(page, "#table tbody th") == ["gae", "chance"]
    assert len(page.find_elements(By.CSS_SELECTOR, ".line")) == 4
    assert texts(page, "#legend span") == ["gae", "chance"]
    find(page, "#all").click()
    assert texts(page, "#table tbody th") == ["light", "gae", "chance", "light"]


def test_a_click_on_a_title_sorts_and_a_second_click_reverses(page):
    def clicked(column):
        page.find_elements(By.CSS_SELECTOR, "#table thead button")[column].click()
        rows = texts(page, "#table tbody tr")
        return [row.split()[0] + " " + row.split()[1] for row in rows], [
            head.get_attribute("aria-sort") for head in page.find_elements(By.CSS_SELECTOR, "#table thead th")
        ]

    assert texts(page, "#table tbody tr:first-child td") == ["pets", "0.500 ± 0.010", "0.200", "–"]
    assert texts(page, "#table tbody strong") == ["0.750", "0.125", "0.750", "0.375", "0.300"]
    names = ["pets gae", "pets light", "cars light", "pets chance"]
    assert clicked(2) == (names, ["none", "none", "descending", "none", "none"])
    assert clicked(2) == (names[::-1], ["none", "none", "ascending", "none", "none"])
    assert clicked(3) == (["pets chance", "pets light", "pets gae", "cars light"], ["none"] * 3 + ["ascending", "none"])
    assert clicked(4)[0][:2] == ["pets chance", "pets gae"]  # the others have no value
    assert clicked(4)[0][:2] == ["pets gae", "pets chance"]
    assert clicked(1)[0] == ["pets chance", "pets gae", "pets light", "cars light"]


def test_a_click_enlarges_a_picture_the_arrows_go_on_and_escape_closes(page):
    dialog = find(page, "dialog")
    page.find_elements(By.CSS_SELECTOR, ".pictures button")[1].click()
    WebDriverWait(page, 120, 0.02).until(lambda _: dialog.get_property("open"))
    assert_alike(shown(page, 0, "dialog"), overlay(IMAGE, TVE))
    assert find(page, "dialog span").text == "0.png · light · cat"
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert_alike(shown(page, 0, "dialog"), overlay(IMAGE, GAE, signed=False))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not dialog.get_property("open")


def test_curves_tell_the_explainer_and_the_value_next_to_the_pointer(page):
    assert texts(page, "#charts figcaption") == ["Fidelity⁺ ↑", "Fidelity⁻ ↓"]
    script = """
        const picture = document.querySelector("#charts svg"), point = picture.querySelectorAll(".line")[1].points[1];
        const at = new DOMPoint(point.x + 1, point.y - 1).matrixTransform(picture.getScreenCTM());
        picture.dispatchEvent(new PointerEvent("pointermove", { clientX: at.x, clientY: at.y }));"""
    page.execute_script(script)
    assert texts(page, ".reading") == ["gae: 0.750 at sparsity 0.50", ""]
    assert len(page.find_elements(By.CSS_SELECTOR, ".line.dim")) == 4


def test_differences_are_from_the_selected_explainer(page):
    def cells():
        return [[cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")] for row in lines()]

    def lines():
        return page.find_elements(By.CSS_SELECTOR, "#differences tbody tr")

    assert cells() == [["light", "−1.250 ± 0.459"]]  # from the best
    Select(find(page, "#base")).select_by_visible_text("light")
    assert cells() == [["gae", "+1.250 ± 0.459"]]
    Select(find(page, "#task")).select_by_visible_text("cars")
    assert cells() == []


def found(page):
    return [name for name in texts(page, "article h2") if name]


def test_the_search_shows_images_by_name_label_and_class(page):
    search = find(page, "#search")
    search.send_keys("14.PNG <b>DOG")
    assert (found(page), find(page, "#found").text) == (["14.png"], "1 of 15")
    assert_alike(shown(page, 1, "article:not([hidden])"), overlay(IMAGE, TVE))
    search.send_keys(" zebra")
    assert (found(page), find(page, "#found").text) == ([], "none of 15")
    search.send_keys(Keys.CONTROL + "a", Keys.DELETE)
    assert len(found(page)) == 15 and find(page, "#found").text == ""


def test_a_link_to_an_image_survives_reloading_and_names_the_task(page):
    find(page, "#search").send_keys("3.png")
    find(page, "article:not([hidden]) h2 a").click()
    assert page.current_url == page.address + "#image=3.png&task=pets"
    page.execute_script("location.hash = '#image=12.png&task=pets'")
    WebDriverWait(page, 120, 0.02).until(lambda _: texts(page, ".linked h2") == ["12.png"])
    assert len(found(page)) == 15  # the search, which hid it, is cleared
    page.refresh()
    assert texts(page, ".linked h2") == ["12.png"]
    page.execute_script("location.hash = '#image=car.png&task=cars'")
    WebDriverWait(page, 120, 0.02).until(lambda _: texts(page, ".linked h2") == ["car.png"])
    page.execute_script("location.hash = '#image=gone%.png'")
    WebDriverWait(page, 120, 0.02).until(lambda _: find(page, "#found").text == "no image gone%.png")
