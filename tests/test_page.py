"""docs/uneven.html, in a real browser: its arithmetic is the code's, and everyone can use it.

Skipped where there is no Chromium; `make test-cluster` installs one (Debian's package).
"""

import random
import shutil

import pytest

from common.uneven.plan import fastest, plan_batches, split
from tests.harness import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGE = f"file://{ROOT}/docs/uneven.html"
LAYOUTS = 1000

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True)
    page = context.new_page()
    page.set_default_timeout(300_000)  # ends what hangs
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda line: page.problems.append(line.text) if line.type == "error" else None)
    page.on("request", lambda one: page.problems.append(one.url) if not one.url.startswith(PAGE) else None)
    page.goto(PAGE)
    yield page
    assert page.problems == []
    context.close()


def random_layouts() -> list[dict]:
    draw, found = random.Random(1), []
    for _ in range(LAYOUTS):
        gpus = [draw.randint(1, 8) for _ in range(draw.randint(1, 6))]
        found.append(
            {
                "gpus": gpus,
                "nodeSpeeds": [100] * len(gpus),
                "rankSpeeds": {},
                "speeds": [draw.choice([100, draw.randint(5, 100)]) for _ in range(sum(gpus))],
                "globalBatch": draw.choice([draw.randint(1, 20), draw.randint(1, 1024)]),
                "microBatch": draw.randint(0, 64),
                "samples": draw.randint(1, 5000),
                "sampleMs": draw.randint(1, 200) / 10,
                "fixedMs": draw.choice([0, draw.randint(0, 500) / 10]),
                "transferMs": 5,
            }
        )
    return found


def test_a_thousand_layouts_are_cut_as_the_code_cuts_them(page):
    """For each: the shares, equal and by speed; every rank's part of the first, a middle and the last step; the rows
    of each micro-batch."""
    layouts = random_layouts()
    found = page.evaluate(
        """layouts => layouts.map((layout) => {
            const steps = stepsPerEpoch(layout.samples, layout.globalBatch);
            return [false, true].map((balanced) => {
                const { shares } = plan(layout, balanced);
                const parts = [0, Math.floor(steps / 2), steps - 1].map(
                    (step) => partsOf(layout.samples, layout.globalBatch, shares, step));
                const micro = parts[2].map(([first, end]) => microBatches(end - first, layout.microBatch));
                return { steps, shares, parts, micro };
            });
        })""",
        layouts,
    )
    for layout, (equal, balanced) in zip(layouts, found, strict=True):
        size, ranks = layout["globalBatch"], len(layout["speeds"])
        costs = [layout["sampleMs"] * 100 / speed for speed in layout["speeds"]]
        for answer, weights in ((equal, [1.0] * ranks), (balanced, fastest(costs, [layout["fixedMs"]] * ranks, size))):
            plan = plan_batches(layout["samples"], size, ranks, weights)
            assert answer["steps"] == plan.steps_per_epoch
            assert tuple(answer["shares"]) == plan.shares, layout
            steps = [0, plan.steps_per_epoch // 2, plan.steps_per_epoch - 1]
            parts = [[plan.part(step, rank) for rank in range(ranks)] for step in steps]
            assert answer["parts"] == [[[one.start, one.stop] for one in step] for step in parts], layout
            for rows, micro in zip(parts[2], answer["micro"], strict=True):
                most = layout["microBatch"] or max(1, len(rows))
                starts = range(0, max(1, len(rows)), most)
                assert micro == [len(rows[start : start + most]) for start in starts], layout


def test_it_draws_as_many_samples_as_each_rank_has(page):
    page.goto(f"{PAGE}#gpus=2,1&speeds=100,50&globalBatch=50&samples=110&microBatch=7&fixedMs=0")
    shares = split(50, [2.0, 2.0, 1.0])
    for where, parts in (("step", shares), ("tail", split(10, shares))):
        drawn = [page.locator(f"#{where} [data-rank='{rank}'] i").count() for rank in range(3)]
        assert tuple(drawn) == parts
    pieces = page.locator("#step [data-rank='0'] .micro").count()
    assert pieces == -(-shares[0] // 7)


def test_a_rank_without_samples_is_said_to_have_none(page):
    page.goto(f"{PAGE}#gpus=4&globalBatch=2&samples=2")
    assert "no samples" in page.locator("#step [data-rank='3']").inner_text()


def test_it_can_be_used_by_keyboard_alone(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "nodes"
    page.keyboard.press("ArrowRight")
    assert "-n 3 -g 3,1,1" in page.locator("#command").inner_text()
    for _ in range(4):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "gpus-0"
    page.keyboard.press("ArrowLeft")
    assert "-n 3 -g 2,1,1" in page.locator("#command").inner_text()


def test_every_control_has_a_name(page):
    page.locator("summary").click()
    inputs = page.locator("input")
    assert inputs.count() > 10
    for index in range(inputs.count()):
        assert inputs.nth(index).evaluate("one => one.labels[0].textContent.trim().length") > 3


def test_a_phone_needs_no_scrolling_to_the_side(browser):
    context = browser.new_context(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(f"{PAGE}#gpus=8,8,2&globalBatch=256")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = "[...document.querySelectorAll('main *')].filter(one => one.innerText?.trim() && "
    small += "parseFloat(getComputedStyle(one).fontSize) < 12).length"
    assert page.evaluate(small) == 0
    context.close()


def test_the_address_keeps_what_was_set(page):
    page.locator("#globalBatch").focus()
    page.keyboard.press("ArrowRight")
    address = page.url
    page.goto("about:blank")
    page.problems.clear()
    page.goto(address)
    assert "--global-batch 65" in page.locator("#command").inner_text()


def test_an_address_that_makes_no_sense_is_read_as_far_as_it_does(page):
    page.goto(f"{PAGE}#gpus=99,x,-1&speeds=1000&globalBatch=abc&microBatch=-5&samples=0")
    assert "-n 1 -g 8 -i 0 --global-batch 64" in page.locator("#command").inner_text()
