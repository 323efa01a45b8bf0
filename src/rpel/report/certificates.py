"""What a run proves, in two statements that must not be taken for one another, and how to make it again.

The sampling: no honest node met more hostile peers in a round than planned for. The rule: it survives that many. A run
is well only if both hold; plain averaging survives none, however few hostile peers were met.
"""

import shlex
from functools import cache
from html import escape
from typing import Any

from rpel.config.spec import OWN, Spec, load, presets
from rpel.report import drawing
from rpel.report.collect import Run
from rpel.simulation.certificate import Robustness, Survival, survival
from rpel.text import percent, value_text

_LISTED = 20  # violations written out; certificate.json has more


def of_run(run: Run) -> Survival:
    """What the run's rule survives."""
    return survival(run.spec.rule or "its own rule", run.proof.pull, run.proof.b_hat)


def well(run: Run) -> bool:
    """Shown in green: as the run left it, the sampling within a plan that applies, the rule not known to be fragile."""
    return not run.edited and run.proof.held and run.proof.guaranteed and of_run(run).robustness is not Robustness.NONE


# --- a run's section -------------------------------------------------------------------------------------------------


def proof(run: Run, label: str, anchor: str) -> str:
    """The certificate of a run, its command line, versions, threads and data, as a folded section."""
    kind = "held" if well(run) else "violated" if not run.proof.held else "plain"
    words = "sampling within the plan" if run.proof.held else "sampling beyond the plan"
    if of_run(run).robustness is Robustness.NONE:
        words += ", rule not robust"
    if run.edited:
        words += f", edited after it had finished: {escape(', '.join(run.edited))}"
    parts = [_certificate(run), _command(run), _made_with(run), _data(run)]
    return (
        f'<details class="run" id="{anchor}"><summary><span class="name">{escape(run.folder)}</span> '
        f'<span class="what">{escape(label)}, seed {run.spec.seed}</span> <span class="{kind}">{words}</span>'
        f'</summary><div class="proof">{"".join(parts)}</div></details>'
    )


def _certificate(run: Run) -> str:
    p, spec, rule = run.proof, run.spec, of_run(run)
    honest = spec.nodes - spec.byzantine
    plan = (
        f"each of {honest:,} honest nodes meets at most b_hat = {p.b_hat} hostile peers among s = {p.pull} pulled "
        f"(b_hat/(s+1) = {p.fraction:.4f}), in all of {spec.rounds:,} rounds, with probability "
        f"{percent(p.probability)}; asked for: {percent(p.confidence)}."
    )
    ends = ", ".join(f"{value:.4f}" for value in run.quartiles)
    nodes = (
        f"<p>Accuracy of the honest nodes at the end, from lowest to highest by quarters: {ends}.</p>" if ends else ""
    )
    fragile = "violated" if rule.robustness is Robustness.NONE else "plain"
    return (
        f"<section><h4>Certificate</h4><p><b>The plan:</b> {escape(plan)} <b>Guarantee:</b> "
        f"{escape(p.guarantee.meaning)}.</p><p><b>The sampling:</b> at most {p.max_observed} were met. "
        f'{_violations(run)}</p><p><b>The rule:</b> <span class="{fragile}">{escape(rule.sentence)}.</span></p>'
        f"<figure>{drawing.histogram(p.histogram, p.b_hat)}"
        "<figcaption>how often a node met that many hostile peers in a round; the line is b_hat</figcaption>"
        f"</figure>{nodes}</section>"
    )


def _violations(run: Run) -> str:
    p = run.proof
    if p.held:
        return f'<span class="{"held" if well(run) else "plain"}">It stayed within the plan.</span>'
    listed = "; ".join(f"round {t:,} node {node:,}: {count:,}" for t, node, count in p.violations[:_LISTED])
    more = "; …" if p.violations_total > _LISTED else ""
    times = "once" if p.violations_total == 1 else f"{p.violations_total:,} times"
    return f'<span class="violated">The plan was violated {times}</span>: {escape(listed + more)}.'


def _command(run: Run) -> str:
    line = command(run.spec)
    if line is None:
        return "<section><h4>Command</h4><p>rpel.simulate in Python, with a model or data of its own.</p></section>"
    return f"<section><h4>Command</h4><pre><code>{escape(line)}</code></pre></section>"


def _made_with(run: Run) -> str:
    pairs = [*run.proof.versions, ("threads", str(run.proof.threads)), ("device", run.spec.device)]
    text = ", ".join(f"{key} {value}" for key, value in pairs)
    return f"<section><h4>Made with</h4><p>{escape(text)}</p></section>"


def _data(run: Run) -> str:
    rows = "".join(f"<li>{escape(name)} <code>{escape(digest)}</code></li>" for name, digest in run.proof.data)
    return f"<section><h4>Data, SHA-256</h4><ul>{rows}</ul></section>" if rows else ""


# --- the command that makes a run again ------------------------------------------------------------------------------

_LEFT_OUT = ("data_dir", "out", "seeds")  # where things lie on one machine, and what one run of several does not know


def command(spec: Spec) -> str | None:
    """The command line, from the preset the run is named after or else the nearest; None for objects from Python.

    >>> command(load("mnist-30").but(attack="foe", seed=3))
    'rpel run mnist-30 --attack foe --seed 3'
    """
    if OWN in (spec.dataset, spec.model):
        return None
    known = _presets()
    base = (
        spec.name if spec.name in known else min(known, key=lambda name: (len(_differences(spec, known[name])), name))
    )
    words = [
        "rpel",
        "run",
        base,
        *(word for key, value in _differences(spec, known[base]) for word in _flag(key, value)),
    ]
    return shlex.join(words)


@cache
def _presets() -> dict[str, Spec]:
    return {name: load(name) for name in presets()}


def _differences(spec: Spec, base: Spec) -> list[tuple[str, Any]]:
    """(field, value) wherever the run is not as the preset; what is unset needs no option."""
    pairs = [(key, getattr(spec, key), getattr(base, key)) for key in Spec.model_fields if key not in _LEFT_OUT]
    return [(key, value) for key, value, theirs in pairs if value is not None and value != theirs]


def _flag(key: str, value: Any) -> list[str]:
    """The option that sets a field.

    >>> _flag("b_hat", 4), _flag("silent", False)
    (['--b-hat', '4'], ['--not-silent'])
    """
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--not-{key}"]
    return [f"--{name}", value_text(value)]
