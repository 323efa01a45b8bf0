"""One syntax for names with parameters, and the code of others by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpel.component import Component, Value, find, load, parse, parse_chain, parse_value
from rpel.errors import unknown


@pytest.mark.parametrize(
    ("text", "args", "keywords"),
    [
        ("median", (), {}),
        ("krum()", (), {}),
        ("foe(3)", (3,), {}),
        ("alie(z=1.5, targeting=most-exposed)", (), {"z": 1.5, "targeting": "most-exposed"}),
        ("krum(neighbours=m-f-2)", (), {"neighbours": "m-f-2"}),
        ("strongest(of=alie+spectral)", (), {"of": "alie+spectral"}),
        ("strongest(of= alie( z = 2 ) + foe)", (), {"of": "alie(z=2)+foe"}),
        ("steps(500:0.5, 1000:1e-1)", ((500, 0.5), (1000, 0.1)), {}),
        ("adamw(betas=[0.9, 0.95], fused=false)", (), {"betas": [0.9, 0.95], "fused": False}),
        ("dirichlet(inf)", ("inf",), {}),
        ("backdoor(share=.5, target=-1)", (), {"share": 0.5, "target": -1}),
        ("asynchronous(speeds=lognormal(.5)+stragglers(.1, 10))",
         (), {"speeds": "lognormal(0.5)+stragglers(0.1, 10)"}),
        ("my.module:rule(path='a b', again=\"it's\")", (), {"path": "a b", "again": "it's"}),
        ("data(folder=/mnt/x.csv)", (), {"folder": "/mnt/x.csv"}),
        ("x(y=[])", (), {"y": []}),
        ("x(model=C(4)-R-M-L(10)-S, lr=.1)", (), {"model": "C(4)-R-M-L(10)-S", "lr": 0.1}),
    ],
)  # fmt: skip
def test_a_component_is_read_and_written(
    text: str, args: tuple[Value, ...], keywords: dict[str, Value]
) -> None:
    read = parse(text)
    assert (read.args, dict(read.keywords)) == (args, keywords)
    assert parse(str(read)) == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' ends too early: a name is missing"),
        ("alie(z=1", "a ')' is missing"),
        ("alie(z=)", "a value is needed before ')'"),
        ("alie z", "'+' or the end is needed before 'z'"),
        ("alie(z=1, z=2)", "gives z twice"),
        ("alie(z=1, 2)", "values without a name come first"),
        ("alie(1 2)", "',' or ')' is needed"),
        ("nnm+", "a name is missing"),
        ("a+b", "is a chain of 2"),
        ("f(" * 60, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        parse(text)
    assert said in str(caught.value)


_words = st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True)
_values = st.recursive(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
    | st.text("abc (),=+:'0.5x[]-", max_size=8).filter(lambda text: '"' not in text),
    lambda inner: st.lists(inner, max_size=3),
)  # fmt: skip


@given(_words, st.lists(_values, max_size=3), st.dictionaries(_words, _values, max_size=3))
def test_every_component_is_read_as_it_was_written(
    name: str, args: list[Value], keywords: dict[str, Value]
) -> None:
    component = Component(name, tuple(args), keywords)
    assert parse(str(component)) == component
    assert [str(part) for part in parse_chain(f"{component}+{component}")] == [str(component)] * 2


def test_values_alone() -> None:
    assert repr(parse_value("5")) == "5"
    assert parse_value("0.1:3") == (0.1, 3)
    assert parse_value("'0.5'") == "0.5"


def test_parameters_are_bound_as_a_call_would() -> None:
    def function(view: object, z: float, *, target: int = 0) -> None: ...

    assert parse("f(2, target=1)").bind_to(function, skip=1) == {"z": 2, "target": 1}
    for text, said in (
        ("f", "f needs its parameter 'z'"),
        ("f(1, 2, 3)", "takes at most 2"),
        ("f(1, z=1)", "gives z twice"),
        ("f(1, y=2)", "has no parameter 'y': it takes z, target"),
    ):
        with pytest.raises(ValueError, match=said):
            parse(text).bind_to(function, skip=1)


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="unknown rule 'krumm'; did you mean 'krum'"):
        find("rpel.rules", "krumm", ["krum", "median"])
    assert unknown("method", "x", ["rpel"]) == "unknown method 'x'; choose one of rpel"


def test_code_of_others_is_found_by_name() -> None:
    assert load("math:sqrt", "rule")(4.0) == 2.0
    for name, said in (
        ("math:sqr", "module math has no 'sqr'"),
        ("no_such_module:rule", "cannot be imported"),
        ("math:", "not of the form module:name"),
    ):
        with pytest.raises(ValueError, match=said):
            load(name, "rule")
