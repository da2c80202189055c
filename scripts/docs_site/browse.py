"""Opens the built site in headless Chromium, wide and narrow, and says what is wrong with it.

    python -m scripts.docs_site.browse [page …]

On every page: images are there, nothing is wider than the screen, formulas are drawn, no script fails, and
nothing is asked of another host. From the first page the search finds words, and the answers to newcomers'
questions are two clicks away. Screenshots of all pages that are looked at go to build/screenshots.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = ROOT / "build" / "site"
SCREENSHOTS = ROOT / "build" / "screenshots"
WIDTHS = {"wide": 1280, "narrow": 390}
# Words that the search must find, and the page that it must name.
SEARCHED = {"stratum": "glossary.html", "DivergedError": "trouble.html", "BlockNewton": "api/methods.html"}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# What is wrong with a page, as the page itself sees it.
FAULTS = """() => {
  const faults = [];
  for (const image of document.images)
    if (image.complete && image.naturalWidth === 0) faults.push("broken image: " + image.getAttribute("src"));
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    faults.push("wider than the screen: " + document.documentElement.scrollWidth + " of " + width);
  const scrolls = element => {
    for (let one = element.parentElement; one; one = one.parentElement)
      if (one !== document.body && ["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX))
        return true;
    return false;
  };
  for (const element of document.querySelectorAll("article *")) {
    const box = element.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !scrolls(element)) {
      faults.push("sticks out: " + element.tagName + " " + element.textContent.slice(0, 60));
      break;
    }
  }
  for (const formula of document.querySelectorAll("article math")) {
    const box = formula.getBoundingClientRect();
    if (formula.offsetParent !== null && (box.width < 3 || box.height < 3))
      faults.push("formula without a size: " + formula.textContent.slice(0, 60));
    if (formula.querySelector("merror") || /\\\\[a-z]/.test(formula.textContent))
      faults.push("formula not drawn: " + formula.textContent.slice(0, 60));
  }
  const prose = document.querySelector("article").cloneNode(true);
  prose.querySelectorAll("pre, code, math").forEach(one => one.remove());
  for (const left of [":math:", ".. math::", "\\\\(", "$$"])
    if (prose.textContent.includes(left)) faults.push("markup is left: " + left);
  return faults;
}"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def look_at(page: Any, address: str, name: str, width: str) -> list[str]:
    """The faults of one page at one width."""
    faults: list[str] = []

    def asked(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            faults.append(f"asks another host: {request.url}")

    listeners = {
        "request": asked,
        "pageerror": lambda error: faults.append(f"a script fails: {error}"),
        "requestfailed": lambda request: faults.append(f"does not load: {request.url}"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    answer = page.goto(f"{address}/{name}", wait_until="load")
    if answer is None or not answer.ok:
        faults.append("cannot be opened")
    # Pictures that load when they are scrolled to are loaded now.
    page.evaluate("() => { for (const image of document.images) image.loading = 'eager'; }")
    page.wait_for_load_state("networkidle")
    faults += page.evaluate(FAULTS)
    path = SCREENSHOTS / width / name.replace("/", "-").replace(".html", ".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path, full_page=False)
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return [f"{name}, {width}: {fault}" for fault in faults]


def search(page: Any, address: str) -> list[str]:
    """The words that the search does not find."""
    faults: list[str] = []
    for word, expected in SEARCHED.items():
        page.goto(f"{address}/index.html", wait_until="networkidle")
        page.locator("[data-md-toggle=search]").dispatch_event("click")  # waits until it is there
        page.fill("input.md-search__input", word)
        result = page.locator(f'.md-search-result__link[href*="{expected}"]')
        for _ in range(20):
            page.press("input.md-search__input", "End")  # the theme looks at the words when a key is released
            with contextlib.suppress(Exception):
                result.first.wait_for(state="attached", timeout=1_000)
                break
        else:
            faults.append(f"the search for {word!r} does not find {expected}")
    return faults


def questions(page: Any, address: str) -> list[str]:
    """The questions on the first page whose answers are not two clicks away."""
    page.goto(f"{address}/index.html", wait_until="load")
    asked = page.eval_on_selector_all('article a[href*="faq.html#"]', "links => links.map(one => one.href)")
    faults = [] if len(asked) >= 9 else [f"the first page has {len(asked)} questions, expected 9 or more"]
    for link in asked:
        page.goto(link, wait_until="load")
        if not page.is_visible(f'[id="{link.partition("#")[2]}"]'):
            faults.append(f"{link} leads nowhere")
    return faults


def main(arguments: list[str]) -> int:
    """Looks at the pages that are named, or at all; returns the exit status."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("Chromium is needed and was not found; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    if not (SITE / "index.html").exists():
        print(f"{SITE} is not built yet: make docs", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    names = arguments or sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    names = [name for name in names if name != "404.html"]
    faults: list[str] = []
    with served(SITE) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for width, pixels in WIDTHS.items():
            page = browser.new_page(viewport={"width": pixels, "height": 900})
            for name in names:
                faults += look_at(page, address, name, width)
            if not arguments:
                found = search(page, address) + questions(page, address)
                faults += [f"{fault} ({width})" for fault in found]
            page.close()
        browser.close()
    print("\n".join(faults) or f"{len(names)} pages, {' and '.join(WIDTHS)}: nothing is wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
