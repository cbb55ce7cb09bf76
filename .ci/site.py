#!/usr/bin/env python3
"""Build the docs as a site: README is its first page, then the chapters in the order in which README lists them.

    .ci/site.py [--into build/site]

Fails where a link, an anchor or a picture is not there, or where a chapter is not in README's list.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"
LISTED = re.compile(r"^\d+\. .*", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\(docs/([\w-]+\.md)\)")


def gather() -> None:
    """Copy README, CONTRIBUTING and docs into one folder, and write the configuration with its list of pages."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    readme = (ROOT / "README.md").read_text()
    for name, page in (("README.md", "index.md"), ("CONTRIBUTING.md", "CONTRIBUTING.md")):
        (SOURCE / page).write_text((ROOT / name).read_text().replace("](docs/", "]("))
    chapters = [link for line in LISTED.findall(readme) for link in LINK.findall(line)]
    pages = [("Uneven DDP", "index.md"), *chapters, ("Contributing", "CONTRIBUTING.md")]
    nav = "".join(f'\n  - "{title[0].upper()}{title[1:]}": {file}' for title, file in pages)
    (SOURCE.parent / "mkdocs.yml").write_text(
        (ROOT / ".ci" / "mkdocs.yml").read_text().replace("../build/", "").rstrip() + nav + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "site", metavar="DIR", help="where to write it")
    into = parser.parse_args().into.absolute()
    gather()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", into]  # --quiet counts no warnings
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "-f", SOURCE.parent / "mkdocs.yml"], env=environ, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    print(f"open {into / 'index.html'} (its search needs a server: python -m http.server -d {into})")


if __name__ == "__main__":
    main()
