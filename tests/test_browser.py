"""The web page as a person uses it: headless Chromium against a real server on SmolLM2.

What SmolLM2 cannot be made to say (thoughts, tool calls, hostile markup, broken streams) comes from canned streams in the server's form.
PEGAINFER_SCREENSHOTS names a folder for pictures. Skipped only where there is no Chromium; .ci/run installs one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from pegainfer_core.testing.served import Served, served
from pegainfer_llama.smollm2 import ensure_checkpoint
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)")

KEY = "a-key-of-the-test"
PATIENCE = 60_000  # ms until a test gives up; nothing is measured by it
WIDE: ViewportSize = {"width": 1280, "height": 800}
NARROW: ViewportSize = {"width": 390, "height": 780}
HOSTILE = "<img src=x onerror=\"window.taken='yes'\"><script>window.taken='yes'</script> **<b>x</b>** `<i>y</i>`"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ensure_checkpoint(), "--api-key", KEY, "--kv-cache-memory", "256MiB") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        # it runs as root in a container, which has little shared memory
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def fresh(browser: Browser, server: Served) -> Iterator[Page]:
    """The page without a key. At the end: it asked no other host, and no script or policy complained."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    asked: list[str] = []
    complaints: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    yield page
    context.close()
    assert [url for url in asked if not url.startswith(server.url)] == []
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


@pytest.fixture
def page(fresh: Page) -> Page:
    """The page with the key, ready."""
    fresh.get_by_role("textbox", name="API key").fill(KEY)
    fresh.get_by_role("button", name="Use").click()
    expect(fresh.get_by_role("button", name="Send")).to_be_enabled()
    return fresh


def say(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Page) -> Any:
    return page.locator("article.assistant").last


def wait_answered(page: Page) -> Any:
    answer = last_answer(page)
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def picture(page: Page, name: str) -> None:
    """A screenshot, if somebody wants to look."""
    folder = os.environ.get("PEGAINFER_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def running(server: Served) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))


def chunk(delta: dict[str, Any], finish: str | None = None, usage: dict[str, Any] | None = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    data = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "test", "choices": [choice]}
    return f"data: {json.dumps(data | ({'usage': usage} if usage else {}))}\n\n"


def can(page: Page, *streams: str) -> list[dict[str, Any]]:
    """Answer the next chats with these streams; returns the bodies, which come in as they are sent."""
    bodies: list[dict[str, Any]] = []
    rest = iter(streams)

    def answer(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        route.fulfill(body=next(rest), content_type="text/event-stream", headers={"X-Request-Id": "id-7"})

    page.route("**/v1/chat/completions", answer)
    return bodies


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(fresh: Page) -> None:
    page = fresh
    expect(page.get_by_text("API key needed")).to_be_visible()
    key = page.get_by_role("textbox", name="API key")
    expect(key).to_be_focused()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    key.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_text("did not take this key")).to_be_visible()
    key.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_text("ready", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_a_chat_streams_and_tells_what_the_api_tells(page: Page, server: Served) -> None:
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("60")
    question = "Tell me about the city of Rome."
    seen: list[str] = []  # text of the answer after each change, as the page shows it
    page.expose_function("sawText", lambda text: seen.append(text))
    page.evaluate(
        "new MutationObserver(() => sawText(document.querySelector('article.assistant .text:not(.reasoning *)')?.textContent ?? ''))"
        ".observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true})"
    )
    say(page, question)
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    expect(page.locator("#running")).to_have_text("1")
    picture(page, "mid-stream")
    answer = wait_answered(page)
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60}
    headers = {"Authorization": f"Bearer {KEY}"}
    told = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
    text = told["choices"][0]["message"]["content"]
    assert answer.locator("> .text").inner_text().split() == text.replace("**", "").split()
    assert len({len(part) for part in seen}) > 5, "it grew as it came"
    usage = told["usage"]
    figures = answer.locator(".figures").inner_text()
    assert f"{usage['prompt_tokens']} prompt tokens" in figures
    assert f"{usage['completion_tokens']} tokens" in figures
    assert "first after" in figures
    assert "tokens/s" in figures
    assert ("cut off at the token limit" in figures) == (told["choices"][0]["finish_reason"] == "length")
    expect(page.locator("#running")).to_have_text("0")
    picture(page, "answered")
    page.emulate_media(color_scheme="dark")
    picture(page, "dark")


def test_stop_ends_the_request_and_keeps_what_came(page: Page, server: Served) -> None:
    page.get_by_label("Temperature").fill("0")
    say(page, "Count from 1 to 1000.")
    expect(last_answer(page).locator("> .text p")).not_to_have_text("")
    page.get_by_role("button", name="Stop").click()
    answer = wait_answered(page)
    assert "stopped by you" in answer.locator(".figures").inner_text()
    assert answer.locator("> .text").inner_text()
    expect(page.locator("#running")).to_have_text("0")
    assert running(server) == 0
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    say(page, "Count again.")
    expect(last_answer(page).locator("> .text p")).not_to_have_text("")
    page.keyboard.press("Escape")
    wait_answered(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)


def test_settings_are_fields_of_the_request_and_empty_ones_are_not_sent(page: Page) -> None:
    done = chunk({"content": "ok"}) + chunk({}, "stop") + "data: [DONE]\n\n"
    bodies = can(page, done, done)
    say(page, "one")
    wait_answered(page)
    assert bodies[0] == {
        "model": "test",
        "messages": [{"role": "user", "content": "one"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    fields = {
        "System prompt": "be brief",
        "Temperature": "0.5",
        "Top p": "0.9",
        "Top k": "20",
        "Min p": "0.05",
        "Max tokens": "7",
        "Seed": "3",
        "Presence penalty": "-1",
        "Frequency penalty": "0.25",
        "Repetition penalty": "1.1",
        "Stop strings, one a line": "END\n###",
        "Tools, as a JSON list": "no list",
    }
    for label, value in fields.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Thinking").select_option("off")
    say(page, "two")
    assert len(bodies) == 1, "what is no JSON is not sent"
    page.get_by_label("Tools, as a JSON list").fill(json.dumps(tools))
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.locator("article.assistant")).to_have_count(2)
    wait_answered(page)
    assert bodies[1] == {
        "model": "test",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "two"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "max_tokens": 7,
        "seed": 3,
        "presence_penalty": -1,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "stop": ["END", "###"],
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": tools,
    }


def test_a_refusal_is_shown_in_the_servers_words(page: Page) -> None:
    page.get_by_label("Max tokens").fill("3")
    say(page, "word " * 9000)
    answer = wait_answered(page)
    problem = answer.get_by_role("alert")
    expect(problem).to_contain_text("context is")
    expect(problem).to_contain_text("status: 400")
    expect(problem).to_contain_text("code: context_length_exceeded")
    expect(problem).to_contain_text("request id: ")
    picture(page, "error")
    page.get_by_role("button", name="New chat").click()
    say(page, "Hello")
    assert wait_answered(page).get_by_role("alert").is_hidden(), "the next one works"


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ('data: {"error": {"message": "the engine failed <b>x</b>", "code": "engine_error"}}\n\n', "failed <b>x</b>"),
        ("", "ended early"),
        ("data: {no json\n\n", "connection was lost"),
    ],
)
def test_a_failure_in_mid_stream_keeps_the_part_and_can_be_tried_again(page: Page, ending: str, words: str) -> None:
    good = chunk({"content": "whole"}) + chunk({}, "stop") + "data: [DONE]\n\n"
    bodies = can(page, chunk({"content": "half an ans"}) + ending, good)
    say(page, "Hi")
    answer = wait_answered(page)
    expect(answer.locator("> .text")).to_have_text("half an ans")
    expect(answer.get_by_role("alert")).to_contain_text(words)
    expect(answer.get_by_role("alert")).to_contain_text("id-7")
    answer.get_by_role("button", name="Retry").click()
    expect(last_answer(page).locator("> .text")).to_have_text("whole")
    assert bodies[0] == bodies[1], "the failed part is not sent"
    assert page.locator("article.assistant").count() == 1


def test_a_server_that_is_gone_is_told(page: Page) -> None:
    page.context.set_offline(True)
    say(page, "Hi")
    expect(wait_answered(page).get_by_role("alert")).to_contain_text("cannot be reached")
    expect(page.locator("#health")).to_have_text("server cannot be reached")
    page.context.set_offline(False)
    expect(page.locator("#health")).to_have_text("ready")


def test_thoughts_and_tool_calls_are_shown_and_results_go_back(page: Page) -> None:
    usage = {
        "prompt_tokens": 1200,
        "completion_tokens": 30,
        "total_tokens": 1230,
        "prompt_tokens_details": {"cached_tokens": 1184},
        "completion_tokens_details": {"reasoning_tokens": 12},
    }
    calls = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    first = chunk({"role": "assistant", "content": ""}) + chunk({"reasoning_content": "I need "})
    first += chunk({"reasoning_content": "the weather."}) + chunk({"content": "Let me look."})
    first += "".join(chunk({"tool_calls": [call]}) for call in calls) + chunk({}, "tool_calls", usage)
    second = chunk({"content": "It is sunny."}) + chunk({}, "stop") + "data: [DONE]\n\n"
    bodies = can(page, first + "data: [DONE]\n\n", second)
    say(page, "What is the weather in Rome?")
    answer = wait_answered(page)
    thoughts = answer.locator("details.reasoning")
    assert thoughts.get_attribute("open") is None, "folded once the answer begins"
    answer.get_by_text("Thought for").click()
    expect(thoughts).to_contain_text("I need the weather.")
    cards = answer.locator("section.call")
    expect(cards).to_have_count(2)
    expect(cards.first).to_contain_text("Calls weather")
    expect(cards.first).to_contain_text("call_1")
    assert json.loads(cards.first.locator("pre").inner_text()) == {"city": "Rome"}
    figures = answer.locator(".figures")
    expect(figures).to_contain_text("1,200 prompt tokens (1,184 cached)")
    expect(figures).to_contain_text("30 tokens (12 thinking)")
    answer.get_by_label("Result of weather").fill('{"sky": "clear"}')
    answer.get_by_label("Result of time").fill("noon")
    picture(page, "tools")
    answer.get_by_role("button", name="Send results").click()
    expect(last_answer(page).locator("> .text")).to_have_text("It is sunny.")
    functions = [{"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "time", "arguments": "{}"}]
    assert bodies[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": f"call_{number}", "type": "function", "function": function}
                for number, function in enumerate(functions, 1)
            ],
            "reasoning_content": "I need the weather.",
        },
        {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear"}'},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    ]


def test_no_text_becomes_markup(page: Page) -> None:
    call = {"index": 0, "id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    text = f"{HOSTILE}\n\n```{HOSTILE}\n{HOSTILE}\n```\nafter"
    stream = chunk({"reasoning_content": HOSTILE}) + chunk({"content": text}) + chunk({"tool_calls": [call]})
    can(page, stream + f"data: {json.dumps({'error': {'message': HOSTILE, 'code': HOSTILE}})}\n\n")
    say(page, HOSTILE)
    answer = wait_answered(page)
    log = page.locator("#log")
    assert log.locator("img, script, b, i").count() == 0
    assert page.evaluate("window.taken") is None
    assert page.locator("article.user .text").inner_text() == HOSTILE
    assert answer.locator(".fence pre").inner_text() == HOSTILE
    assert answer.locator(".call pre").inner_text() == HOSTILE
    assert answer.locator("strong", has_text="<b>x</b>").count() == 2, "in thoughts and answer"
    assert HOSTILE in answer.get_by_role("alert").inner_text()


def test_the_policy_keeps_scripts_from_making_markup_of_text(browser: Browser, server: Served) -> None:
    page = browser.new_page()
    page.goto(server.url)
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<p>x</p>'; return 'allowed'; } catch (error) { return error.name; } }"
    )
    assert refused == "TypeError"
    assert page.locator("main").count() == 1
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_no_barrier_is_found(page: Page, scheme: Any, size: ViewportSize) -> None:
    """axe-core finds nothing: contrast, names, roles, landmarks, focus; neither empty nor with every kind of turn."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    stream = chunk({"reasoning_content": "Hm."}) + chunk({"content": "Look:\n```python\nprint(1)\n```\n`x` **y**"})
    stream += chunk({"tool_calls": [call]}) + chunk({}, "tool_calls") + "data: [DONE]\n\n"
    can(page, stream, 'data: {"error": {"message": "it broke", "code": "x"}}\n\n')
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(size)
    _no_violations(page)
    if size is NARROW:
        expect(page.locator("#panel")).to_be_hidden()
    say(page, "Hello")
    wait_answered(page)
    say(page, "And now?")
    wait_answered(page)
    _no_violations(page)
    picture(page, f"turns-{'narrow' if size is NARROW else 'wide'}-{scheme}")
    if size is NARROW:
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("#panel")).to_be_visible()
        _no_violations(page)
        picture(page, f"narrow-settings-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is cut off sideways"


def _no_violations(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    assert [(item["id"], [node["html"] for node in item["nodes"]]) for item in found] == []


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.get_by_role("textbox", name="Message").focus()
    wanted = {"model", "new", "theme", "panel-button", "prompt", "key", "send", "log"}
    reached: set[str] = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name || ''"))
    assert wanted <= reached
    assert {"system", "temperature", "top_p", "seed", "stop", "tools", "thinking"} <= reached


def test_the_theme_can_be_chosen_and_is_kept(page: Page) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(color)
    for name in ("Theme: auto", "Theme: light"):
        page.get_by_role("button", name=name).click()
    dark = page.evaluate(color)
    assert dark != light
    page.reload()
    assert page.evaluate(color) == dark
