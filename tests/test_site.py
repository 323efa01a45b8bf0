"""The site's own program: the figure that runs in the page answers as the planner does."""

import json
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rpel
from support.paths import ROOT

pytestmark = pytest.mark.integration

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


@needs_node
@settings(max_examples=15, deadline=None)
@given(
    nodes=st.integers(10, 20_000),
    share=st.floats(0.01, 0.3),
    rounds=st.sampled_from([10, 200, 2000]),
    confidence=st.sampled_from([0.9, 0.99, 0.9999]),
)
def test_the_figure_in_the_page_answers_as_the_planner_does(
    nodes: int, share: float, rounds: int, confidence: float
) -> None:
    byzantine = max(1, int(nodes * share))
    expected = rpel.plan(nodes=nodes, byzantine=byzantine, rounds=rounds, confidence=confidence)
    program = (
        f"const {{ plan }} = require({json.dumps(str(ROOT / 'docs/_static/pull.js'))});"
        f"console.log(JSON.stringify(plan({nodes}, {byzantine}, {rounds}, {confidence}, {nodes}).chosen))"
    )
    assert NODE is not None
    found = json.loads(subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True).stdout)
    assert (found["s"], found["bHat"]) == (expected.pull, expected.b_hat)
    assert found["probability"] == pytest.approx(expected.probability, rel=1e-6)
