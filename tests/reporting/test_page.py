"""The page of a report in a real browser: safe, usable with and without its script, fit to see."""

import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.kit.browser import Chromium, chromium
from tests.kit.reports import SCRIPT, Made, Page, fake_latents, pack_pictures, source_of_pictures

COUNT = 40


@pytest.fixture(scope="module")
def canary() -> Iterator[socket.socket]:
    """A server of this machine that nobody should ever ask for anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, canary: socket.socket) -> Page:
    made = Made(root=tmp_path_factory.mktemp("page"))
    address = "http://{}:{}/x".format(*canary.getsockname())
    captions = [
        f'<img src="{address}" onerror="fetch(`{address}`)"><link rel=stylesheet href="{address}">',
        f"</p></li><iframe src={address}></iframe><svg onload=document.title='stolen'>",
        "the word serendipity stands here alone",
        "long " * 100,
        "\x00\x1b[31m\ud800 \u202e right to left",
    ]
    texts = [text.encode("utf-8", "replace").decode() for text in captions]
    source = source_of_pictures(made.root / "photos", count=COUNT, more=texts)
    pack_pictures(source, made.images)
    fake_latents(made.images, made.latents)
    return made.report(samples=COUNT, model="none")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def seen(browser: Chromium, page: Page) -> Chromium:
    """The page, freshly opened from the disk, in a window of usual size."""
    browser.look(width=1200)
    browser.open(page.url)
    return browser


def shown(browser: Chromium) -> list[str]:
    """The keys on the cards that are to be seen."""
    found: list[str] = browser.evaluate(
        "[...document.querySelectorAll('.card')].filter((card) => card.checkVisibility())"
        ".map((card) => card.querySelector('h4').textContent)"
    )
    return found


def search(browser: Chromium, text: str) -> str:
    """Put text into the search field; what is said to be found."""
    said: str = browser.evaluate(
        f"search.value = {text!r}; search.dispatchEvent(new Event('input'));"
        "document.getElementById('shown').value"
    )
    return said


def test_a_caption_is_text_and_never_runs(seen: Chromium, page: Page) -> None:
    title = page.root.one("head").one("title").text
    assert seen.evaluate("document.title") == title
    texts = seen.evaluate("[...document.querySelectorAll('.caption')].map((p) => p.textContent)")
    assert SCRIPT in texts
    assert any(text.startswith("</p></li><iframe src=") for text in texts)
    assert seen.evaluate("document.querySelectorAll('iframe, script, link').length") == 2
    assert seen.evaluate("document.scripts.length") == 1


def test_nothing_is_asked_for_but_the_file(
    seen: Chromium, page: Page, canary: socket.socket
) -> None:
    search(seen, "serendipity")
    assert {url for url in seen.asked if not url.startswith("data:image/")} == {page.url}
    with pytest.raises(BlockingIOError):
        canary.accept()


def test_even_what_was_put_into_the_page_may_ask_for_nothing(
    seen: Chromium, canary: socket.socket
) -> None:
    """Its policy holds where an escape would have been forgotten."""
    address = "http://{}:{}/x".format(*canary.getsockname())
    done = seen.evaluate(
        "(async () => { const place = document.createElement('div');"
        f"place.innerHTML = `<img src='{address}' onerror='window.ran = 1'>`;"
        "document.body.append(place); const script = document.createElement('script');"
        "script.textContent = 'window.ran = 2'; document.body.append(script);"
        f"const sent = await fetch('{address}').then(() => 'sent', () => 'refused');"
        "return [window.ran ?? 0, sent]; })()"
    )
    assert done == [0, "refused"]
    with pytest.raises(BlockingIOError):
        canary.accept()


def test_search_finds_captions_keys_and_sources(seen: Chromium, page: Page) -> None:
    assert search(seen, "SERENDIPITY here") == "1 to 1 of 1"
    (key,) = shown(seen)
    assert "the word serendipity" in page.cards[key].text
    assert search(seen, key) == "1 to 1 of 1"
    assert search(seen, "photo-0007.jpg") == "1 to 1 of 1"
    assert search(seen, "no such words") == "nothing found"
    assert shown(seen) == []
    assert search(seen, "") == f"1 to 12 of {COUNT}"


def test_pages_hold_every_sample_once(seen: Chromium, page: Page) -> None:
    found = shown(seen)
    assert seen.evaluate("previous.disabled")
    while not seen.evaluate("next.disabled"):
        seen.evaluate("next.click()")
        assert 0 < len(shown(seen)) <= 12
        found += shown(seen)
    assert found == list(page.cards)
    assert seen.evaluate("document.activeElement.id") == "previous"
    seen.evaluate("size.value = '48'; size.dispatchEvent(new Event('change'))")
    assert shown(seen) == list(page.cards)
    seen.evaluate("group.value = 'bucket 128'; group.dispatchEvent(new Event('change'))")
    groups = {place.attributes["data-group"]: place for place in page.root.every(class_="group")}
    assert shown(seen) == [c.one("h4").text for c in groups["bucket 128"].every(class_="card")]
    assert search(seen, "") == f"1 to {len(shown(seen))} of {len(shown(seen))}"


def test_without_its_script_the_page_shows_all(browser: Chromium, page: Page) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page.url)
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert "searchbox" not in roles
    headings = [node["name"]["value"] for node in nodes if is_a(node, "heading")]
    assert set(page.cards) <= set(headings)


def is_a(node: dict[str, Any], *roles: str) -> bool:
    return not node["ignored"] and node["role"]["value"] in roles


def test_a_screen_reader_hears_a_name_for_everything(seen: Chromium) -> None:
    nodes = seen.call("Accessibility.getFullAXTree")["nodes"]
    named = ("image", "img", "button", "searchbox", "combobox", "table", "link", "region")
    for node in nodes:
        if is_a(node, *named):
            assert node["name"]["value"].strip(), node
    assert sum(is_a(node, "image", "img") for node in nodes) > 12
    headings = [node for node in nodes if is_a(node, "heading")]
    levels = [int(level(node)) for node in headings]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for landmark in ("main", "navigation", "search", "banner", "contentinfo"):
        assert sum(is_a(node, landmark) for node in nodes) == 1, landmark
    html = seen.evaluate("document.documentElement.lang")
    assert html == "en"


def level(node: dict[str, Any]) -> str:
    return str(next(p["value"]["value"] for p in node["properties"] if p["name"] == "level"))


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_the_page_fits_every_window(browser: Chromium, page: Page, width: int) -> None:
    browser.look(width=width)
    browser.open(page.url)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_pictures_on_the_cards_are_decoded(seen: Chromium) -> None:
    sizes = seen.evaluate(
        "Promise.all([...document.querySelectorAll('.card:not([hidden]) img')]"
        ".map((img) => img.decode().then(() => img.naturalWidth)))"
    )
    assert len(sizes) == 2 * 12 - 1  # an original and a latent each, but for what is cut short
    assert set(sizes) == {8, 64, 100}
