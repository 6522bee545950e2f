"""The documentation site: it builds without a warning, and a headless browser shows each of its pages on a desktop and a phone.

The build takes half a minute, so that one test does it and checks what it built.
"""

import contextlib
import functools
import http.server
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from browser import MISSING, browser

ROOT = Path(__file__).parents[1]
PARTS = """
    const main = document.querySelector('[role=main], main');
    return {
        headings: document.querySelectorAll('h1').length,
        width: document.documentElement.scrollWidth - innerWidth,
        unnamed: [...document.images].filter(each => !each.alt).map(each => each.src),
        broken: [...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src),
        empty: main.textContent.trim().length < 20,
    };
"""
FINE = {"headings": 1, "unnamed": [], "broken": [], "empty": False}


@pytest.mark.build
def test_the_site_in_a_browser(tmp_path):
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    command = [sys.executable, "-P", "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if MISSING:
        pytest.skip(MISSING)
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    pages -= {"index.html", "search.html"}  # the first leads to docs/index.html
    assert len(pages) > 100
    with served(tmp_path) as url, browser() as window:
        found = {
            (page, width): problems(window, f"{url}/{page}", width) for page in sorted(pages) for width in (1280, 390)
        }
        assert {at: each for at, each in found.items() if each} == {}
        window.open(f"{url}/index.html", 1280)
        window.type(".sidebar-search", "register_lowering\n")
        results = wait_for(
            lambda: window.run("return [...document.querySelectorAll('ul.search li a')].map(a => a.href)")
        )
        assert f"{url}/docs/reference/operators.html" in {each.partition("#")[0] for each in results}
        assert window.log() == []


def problems(window, url, width):
    """Return what is wrong with a page."""
    window.open(url, width)
    parts = window.run(PARTS)
    wrong = {name: parts[name] for name, value in FINE.items() if parts[name] != value}
    wrong |= {"wider by": parts["width"]} if parts["width"] > 0 else {}
    said = window.log()
    return wrong | ({"console": said} if said else {})


def wait_for(value, seconds=20):
    """Return the first result that is not empty."""
    end = time.monotonic() + seconds
    while not (found := value()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def served(folder):
    """Serve a folder over HTTP, without which the search cannot read pages; yield its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
