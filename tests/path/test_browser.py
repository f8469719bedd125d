"""The pages of the public port in a real browser: what they load, show with a key and without, and send."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import CHROMIUM, Page, opened
from stacks import EXAMPLES, Stack, key, picture

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
DESCRIBED = "!document.getElementById('services').hasAttribute('aria-busy') && document.querySelector('section')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def described(page: Page) -> list[str]:
    """Return the headings of the operations that are shown."""
    page.wait(f"{DESCRIBED} ? 1 : 0")
    found: list[str] = page.run("[...document.querySelectorAll('section h2')].map(each => each.textContent)")
    return found


def identify(page: Page, key: str) -> None:
    page.run(f"document.getElementById('key').value = '{key}'")
    page.run("document.getElementById('services').setAttribute('aria-busy', 'true')")
    page.run("document.getElementById('identify').requestSubmit()")


def published(page: Page, key: str, *paths: str) -> None:
    """Wait until the description for a key has these paths: the gateway asks its pools one after the other."""
    page.run(f"""(async () => {{
      for (;;) {{
        const answer = await fetch("/openapi.json", {{headers: {{authorization: "Bearer {key}"}}}});
        const found = (await answer.json()).paths;
        if ({list(paths)}.every((each) => each in found)) return;
        await new Promise((done) => setTimeout(done, 50));
      }}
    }})()""")


def send(page: Page, section: str) -> str:
    """Press Send of an operation; return the first line of its answer once it is complete."""
    find = f"document.getElementById('{section}')"
    page.run(f"{find}.querySelector('form').requestSubmit()")
    page.wait(f"{find}.querySelector('.answer h3.good, .answer h3.bad') && {find}.querySelector('.answer pre')")
    return str(page.run(f"{find}.querySelector('.answer h3').textContent"))


def answer(page: Page, section: str) -> str:
    return str(page.wait(f"document.getElementById('{section}').querySelector('.answer pre').textContent"))


def test_the_start_page_leads_to_the_description(page: Page, stack: Stack, tmp_path: Path) -> None:
    page.open(f"{stack.base}/")
    page.picture(tmp_path / "start.png", height=600)
    page.run("document.querySelector('a[href=\"/docs\"]').click()")
    page.wait("location.pathname === '/docs'")
    assert "/v1/services/{service}" in described(page)
    assert page.run("document.getElementById('identified').textContent").startswith("Without a key")


def test_a_key_shows_its_services_and_tries_them_with_their_samples(page: Page, stack: Stack, tmp_path: Path) -> None:
    page.open(f"{stack.base}/docs")
    paths = ("/v1/services/digits", "/v1/services/checked_digit", "/v2/models/digits/infer")
    published(page, "oriel-demo-gold", *paths)
    described(page)
    identify(page, "oriel-demo-gold")
    assert {"digits", "checked_digit", "/v2/models/digits/infer"} <= set(described(page))
    for service, label in (("digits", 7), ("checked_digit", 3)):
        assert page.run(f"document.querySelector('#service-{service} select').value") == "image/png", "the sample's"
        sent = send(page, f"service-{service}")
        assert sent.startswith("200 "), answer(page, f"service-{service}")
        assert f'"label": {label}' in answer(page, f"service-{service}")
    assert send(page, "model-digits").startswith("200 ") and '"model_name": "digits"' in answer(page, "model-digits")
    curl = page.run("document.querySelector('#service-digits form > pre').textContent")
    assert "$ORIEL_KEY" in curl and "oriel-demo" not in curl
    assert page.run("document.querySelectorAll('section details[open]').length") == 1, "the other cards are closed"
    for language, words in (("Python", "requests.request("), ("JavaScript", "await fetch("), ("curl", "curl '")):
        chosen = "[...document.querySelectorAll('#service-digits form select')].at(-1)"
        page.run(f"{chosen}.value = '{language}'; {chosen}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        shown = page.run("document.querySelector('#service-digits form > pre').textContent")
        assert words in shown and "ORIEL_KEY" in shown and "oriel-demo" not in shown
    page.picture(tmp_path / "gold.png", height=2400)


def test_on_a_phone_nothing_is_wider_than_the_page_and_the_list_is_closed(page: Page, stack: Stack) -> None:
    for width, closed in ((390, True), (1280, False)):
        page.tell("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
        page.open(f"{stack.base}/docs")
        described(page)
        identify(page, "oriel-demo-gold")
        assert "digits" in described(page)
        page.run("for (const each of document.querySelectorAll('section details')) each.open = true")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.getElementById('list').open") is not closed
        links = page.run("[...document.querySelectorAll('nav a')].map((each) => each.hash.slice(1))")
        assert len(links) == len(set(links)) == page.run("document.querySelectorAll('section').length")


def test_another_key_shows_less_and_a_wrong_one_says_so(page: Page, stack: Stack, tmp_path: Path) -> None:
    page.open(f"{stack.base}/docs")
    published(page, "oriel-demo-bronze", "/v1/services/digits")
    described(page)
    identify(page, "oriel-demo-bronze")
    shown = described(page)
    assert "digits" in shown and not {"checked_digit", "/v2/models/mlp/infer"} & set(shown)
    identify(page, "of-nobody")
    wrong = page.wait("document.querySelector('#identified.bad')?.textContent")
    assert "the key or token is not valid" in wrong and page.run("document.querySelectorAll('section').length") == 0
    page.picture(tmp_path / "wrong.png")


def test_the_logic_servers_own_page_asks_for_no_key(page: Page, stack: Stack, tmp_path: Path) -> None:
    page.open(f"http://{stack.address('logic', 'http')}/docs")
    assert {"digits", "checked_digit"} <= set(described(page))
    assert page.run("getComputedStyle(document.getElementById('identify')).display") == "none"
    assert send(page, "checked_digit").startswith("200 ") and '"label": 3' in answer(page, "checked_digit")
    page.picture(tmp_path / "logic.png")


def test_the_console_shows_the_demos_calls_as_oriel_top_does(page: Page, stack: Stack) -> None:
    address = stack.address("gateway", "admin")
    sent = {
        "/v1/services/digits": picture(7),
        "/v2/models/digits/infer": (EXAMPLES / "digits" / "7.v2.json").read_bytes(),
    }
    for path, body in sent.items():
        kind = {"content-type": "image/png"} if path.startswith("/v1") else {}
        answer = httpx.post(f"{stack.base}{path}", content=body, headers={**key("gold"), **kind})
        assert answer.status_code == 200
    page.open(f"http://{address}/console")
    rows = "[...document.querySelectorAll('.area-targets tbody tr')].map(each => each.innerText)"
    page.wait(f"{rows}.some(each => each.includes('digits'))")
    page.wait(f"{rows}.some(each => each.includes('CPU'))")
    shown = stack.oriel("top", "--once", "--admin-port", address.rpartition(":")[2])
    assert shown.returncode == 0 and "digits (service)" in shown.stdout and "gold" in shown.stdout, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_nothing_came_from_elsewhere_and_nothing_was_objected_to(page: Page, stack: Stack) -> None:
    own = (f"{stack.base}/", *[f"http://{stack.address(*each)}/" for each in (("logic", "http"), ("gateway", "admin"))])
    asked = [url for url in page.requested if not url.startswith(("data:", "blob:", *own))]
    assert page.requested and asked == []
    assert [each for each in page.complaints if "401" not in each] == []
