"""The web page's files and headers; tests/test_browser.py uses it as a person does."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pegainfer_core
import pytest
from pegainfer_server.web_ui import ui_files

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class References(HTMLParser):
    """What an HTML text loads, and what of it is no file."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.files += [str(given[name]) for name in ("src", "href") if name in given and tag != "a"]
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


async def test_browsers_get_the_page_and_probes_get_json(served: Any) -> None:
    page = await served.http.get("/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["vary"] == "Accept"
    version = {"name": "pegainfer", "version": pegainfer_core.__version__}
    assert (await served.http.get("/")).json() == version
    assert (await served.http.head("/", headers=HTML)).status_code == 200


async def test_everything_it_loads_is_a_file_of_the_server(served: Any) -> None:
    found = References()
    found.feed((await served.http.get("/", headers=HTML)).text)
    assert found.inline == []
    imported = {
        f"ui/{name}"
        for file in ui_files().values()
        for name in re.findall(r'from "\./([\w.]+)"', file.content.decode())
    }
    wanted = {*found.files, *imported}
    assert wanted == {f"ui/{name}" for name in ui_files() if name != "index.html"}
    for name in wanted:
        answer = await served.http.get(f"/{name}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
    namespace = b"http://www.w3.org/2000/svg"
    assert [name for name, file in ui_files().items() if b"://" in file.content.replace(namespace, b"")] == []


@pytest.mark.parametrize("path", ["/", "/ui/app.js"])
async def test_a_strict_policy_comes_with_every_file(served: Any, path: str) -> None:
    answer = await served.http.get(path, headers=HTML)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    again = await served.http.get(path, headers={**HTML, "If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_a_key_guards_what_the_page_asks_and_not_the_page(serve: Any) -> None:
    served = await serve(api_keys=("secret",))
    for path in ("/", "/ui/app.js", "/ui/style.css"):
        assert (await served.http.get(path, headers=HTML)).status_code == 200
    for path in ("/", "/metrics", "/v1/models", "/version"):
        assert (await served.http.get(path)).status_code == 401


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e/web_ui.py", "__init__.py"])
async def test_other_names_are_no_files(served: Any, name: str) -> None:
    assert (await served.http.get(f"/ui/{name}")).status_code == 404


async def test_it_can_be_off(serve: Any) -> None:
    served = await serve(ui=False, api_keys=("secret",))
    key = {"Authorization": "Bearer secret"}
    assert (await served.http.get("/", headers=HTML | key)).json()["name"] == "pegainfer"
    assert (await served.http.get("/ui/app.js", headers=key)).status_code == 404
    assert (await served.http.get("/", headers=HTML)).status_code == 401
    assert (await served.http.get("/ui/app.js")).status_code == 401
