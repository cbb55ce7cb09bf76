"""`make site`: README and chapters as a site that needs no network, and in which every link leads somewhere."""

import re
import shutil

import pytest

from tests.harness import ROOT, run

pytestmark = pytest.mark.long

SITE = ROOT / ".ci" / "site.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what the site is made of, which a test may spoil."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def site(checkout):
    result = run("python", checkout / ".ci" / "site.py")
    assert result.code == 0, result.output
    return checkout / "build" / "site"


def test_every_chapter_is_a_page_and_the_page_to_play_with_is_there(site):
    pages = {path.name for path in site.glob("*.html")}
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} | {"index.html"} <= pages
    assert (site / "uneven.html").read_text() == (ROOT / "docs" / "uneven.html").read_text()


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*?(?:src|href)="?(https?://[^"\s>]+)', page.read_text())
        assert not loaded, page.name


@pytest.mark.parametrize("link", ["[gone](docs/gone.md)", "[gone](docs/faults.md#no-such-heading)"])
def test_a_link_that_leads_nowhere_fails(checkout, link):
    readme = checkout / "README.md"
    before = readme.read_text()
    try:
        readme.write_text(before + f"\n{link}\n")
        result = run("python", checkout / ".ci" / "site.py", "--into", checkout / "spoilt")
    finally:
        readme.write_text(before)
    assert result.code != 0
    assert "gone.md" in result.output or "no-such-heading" in result.output


def test_a_chapter_that_readme_does_not_list_fails(checkout):
    extra = checkout / "docs" / "extra.md"
    extra.write_text("# Extra\n")
    try:
        result = run("python", checkout / ".ci" / "site.py", "--into", checkout / "spoilt")
    finally:
        extra.unlink()
    assert result.code != 0
    assert "extra.md" in result.output
