"""Every field of a run is listed, and can be set."""

import json

import pytest

from rpel.spec import Execution, Spec
from support.commands import rpel

pytestmark = pytest.mark.integration


def test_fields_are_listed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(rpel("list", "fields", "--json", capsys=capsys)[0])
    about = {row["name"]: row["about"] for row in rows}
    assert about.keys() == Spec.model_fields.keys() | Execution.model_fields.keys()
    assert about["eval_every"].endswith("[20]")


def test_field_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (("bach_size=5", "'batch_size'"), ("batch_size", "FIELD=VALUE")):
        assert said in rpel("run", "quickstart", "--set", given, code=2, capsys=capsys)[1]
