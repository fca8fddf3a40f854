"""The operators' page in a real browser: what it shows, that it loads nothing else, and that the keyboard is enough."""

import re
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright
from processes import PATIENCE, pool
from scripted import completion, gate
from wire import Call, chat, post

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM, "no chromium: apt-get install chromium, as tests/run does"
    with sync_playwright() as playwright:
        # Root has no sandbox, as in most containers.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page of the browser. Whatever it complains of, and whatever it asks of others than the gateway, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE * 1000)
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.complaints = complaints
    yield page
    context.close()
    assert not complaints, complaints


def lane(page, backend):
    return page.locator(".lane", has=page.get_by_role("heading", name=backend.url.removeprefix("http://")))


def test_what_waits_is_drawn_listed_and_leaves(launch, page):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1})).healthy(1)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(gateway.admin)
    expect(page.locator("#state")).to_have_text(re.compile("^live"))
    expect(lane(page, backend)).to_contain_text("nothing waits")

    calls = [Call(gateway, chat(), headers={"x-request-id": "<b>first</b>"})]
    backend.exchange(0)
    for name in ("second", "third"):
        calls.append(Call(gateway, chat(), headers={"x-request-id": name}))
        gateway.wait_waiting(len(calls) - 1)
    expect(lane(page, backend)).to_contain_text("2 wait")
    expect(lane(page, backend)).to_contain_text("1 of 1 slots in use")
    expect(lane(page, backend).locator(".bar")).to_have_count(2)
    expect(page).to_have_title("(2) Headway")

    # By keyboard: from the top to the list of what waits.
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the queues")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    button = page.get_by_role("button", name="list them")
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    rows = page.get_by_role("table", name="Requests that wait").get_by_role("row")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("second")
    expect(rows.nth(2)).to_contain_text("third")

    for index, call in enumerate(calls):
        backend.exchange(index).released.set()
        assert call.result().status_code == 200
    expect(lane(page, backend)).to_contain_text("nothing waits")
    assert all(url.startswith(gateway.admin) for url in asked), asked


def test_what_goes_wrong_is_said(launch, page):
    backend = launch.backend(lambda exchange: exchange.reply(status=exchange.json["seed"], body=completion()))
    gateway = launch.gateway(pool("sim", backend, retries=0), pool("big", {"url": "http://127.0.0.1:9"}, name="down")).healthy(1)
    assert post(gateway, chat(seed=400), headers={"x-request-id": "<img src=x onerror=alert(1)>"}).status_code == 400
    assert post(gateway, chat(seed=200)).status_code == 200
    page.goto(gateway.admin)
    alarm = page.get_by_role("region", name="Alarms")
    expect(alarm).to_contain_text("No backend of down takes requests")
    expect(alarm).to_contain_text("HeadwayPoolDown")
    row = page.get_by_role("table", name="Requests that failed").get_by_role("row").nth(1)
    expect(row).to_contain_text("backend refused")
    expect(row).to_contain_text("<img src=x onerror=alert(1)>")

    page.get_by_role("button", name="down").click()
    expect(page.get_by_role("button", name="down")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".lane")).to_have_count(1)
    expect(page.locator(".lane")).to_contain_text("ejected")
    page.reload()
    expect(page.get_by_role("button", name="down")).to_have_attribute("aria-pressed", "true")


def test_a_lost_gateway_shows(launch, page):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    page.goto(gateway.admin)
    expect(page.locator("#state")).to_have_text(re.compile("^live"))
    gateway.kill()
    expect(page.locator("#state")).to_have_text(re.compile("^no connection"))
    # That is what it has to complain of.
    page.complaints.clear()


def test_light_dark_and_narrow(launch, page):
    gateway = launch.gateway(pool("sim", launch.backend())).healthy(1)
    grounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(gateway.admin)
        grounds.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert len(grounds) == 2
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.locator(".lane")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing to scroll sideways"


def test_the_keyboard_stays_where_it_was_when_a_list_is_drawn_anew(launch, page):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1})).healthy(1)
    calls = [Call(gateway, chat(), headers={"x-request-id": "first"})]
    backend.exchange(0)
    for name in ("second", "third"):
        calls.append(Call(gateway, chat(), headers={"x-request-id": name}))
        gateway.wait_waiting(len(calls) - 1)
    page.goto(gateway.admin)
    page.get_by_role("button", name="list them").click()
    rows = page.get_by_role("table", name="Requests that wait")
    rows.get_by_role("button", name="third").focus()
    backend.exchange(0).released.set()
    # The one before it is gone, and the table is another one.
    expect(rows.get_by_role("row")).to_have_count(2)
    expect(rows.get_by_role("button", name="third")).to_be_focused()
    for index in (1, 2):
        backend.exchange(index).released.set()
    for call in calls:
        assert call.result().status_code == 200


def test_what_arrival_order_would_have_given_is_drawn(launch, page):
    engine = launch.engine(slots=2, speed=20.0)
    gateway = launch.gateway(pool("sim", {"url": engine.url, "slots": 2}), policy="uniboost").healthy(1)
    calls = [Call(gateway, chat(f"number {number} " * (1 + number % 7), stream=True, max_tokens=10 + 40 * (number % 2))) for number in range(60)]
    for call in calls:
        assert call.result().status_code == 200
    page.goto(gateway.admin)
    for title in ("Time to the first token", "Time to the last token"):
        chart = page.locator("figure", has=page.get_by_role("heading", name=title))
        expect(chart).to_contain_text(re.compile(r"by arrival p50 .* s.*Last tokens came .*The model is "))
        assert chart.locator("path.was").count() == 2
