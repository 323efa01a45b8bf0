"""A page in headless chromium, driven by a script that writes what it finds into #found."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.waiting import PATIENCE

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--enable-logging=stderr", "--virtual-time-budget=5000",
)  # fmt: skip
CATCH = """
window.problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => problems.push("policy: " + event.violatedDirective));
"""


def in_chromium(text: str, drive: str, tmp_path: Path) -> dict[str, Any]:
    """What the driving script finds in the page; it is let in through the page's own policy, by hash."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (CATCH, drive)]
    text = text.replace("script-src ", "script-src " + "".join(f"'sha256-{one}' " for one in hashes), 1)
    text = text.replace("<title>", f"<script>{CATCH}</script><title>", 1)
    text = text.replace("</body>", f'<pre id="found"></pre><script>{drive}</script></body>')
    (tmp_path / "driven.html").write_text(text, "utf-8")
    command = [
        chromium,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1200,900",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, (tmp_path / "driven.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr
    content: dict[str, Any] = json.loads(html.unescape(match[1]))
    content["problems"] += [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return content
