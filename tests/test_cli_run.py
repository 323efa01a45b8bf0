"""run, resume and show as a stranger meets them: real processes, killed and interrupted;
statuses and sentences."""

import pytest

from rpel.spec import Spec, load
from support.commands import rpel

pytestmark = pytest.mark.integration


def test_help_tells_library_defaults_from_preset_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = rpel("run", "--help", capsys=capsys)[0]
    assert "quickstart:" not in text
    default, preset = Spec.model_fields["eval_every"].default, load("quickstart").eval_every
    assert default != preset
    assert f"[unless the source says: {default}]" in " ".join(text.split())


def test_field_keeps_the_preset_value_unless_given_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = rpel("run", "--help", capsys=capsys)[0]
    for key in Spec.model_fields:
        assert f"--{key.replace('_', '-')}" in text
