"""What each run proves and how to make it again, folded away one by one."""

from html import escape

from rpel.report import drawing
from rpel.report.collect import Run
from rpel.report.command import command
from rpel.text import percent

_LISTED = 20  # violations written out; certificate.json has more


def proof(run: Run, label: str, anchor: str) -> str:
    """The certificate of a run, its command line, versions, threads and data, as a folded section."""
    verdict = "held" if run.proof.held else "violated"
    parts = [_certificate(run), _command(run), _made_with(run), _data(run)]
    return (
        f'<details class="run" id="{anchor}"><summary><span class="name">{escape(run.folder)}</span> '
        f'<span class="what">{escape(label)}, seed {run.spec.seed}</span> <span class="{verdict}">{verdict}</span>'
        f'</summary><div class="proof">{"".join(parts)}</div></details>'
    )


def _certificate(run: Run) -> str:
    p, spec = run.proof, run.spec
    honest = spec.nodes - spec.byzantine
    plan = (
        f"The plan: each of {honest:,} honest nodes meets at most b_hat = {p.b_hat} hostile peers among "
        f"s = {p.pull} pulled (b_hat/(s+1) = {p.fraction:.4f}), in all of {spec.rounds:,} rounds, with probability "
        f"{percent(p.probability)}; asked for: {percent(p.confidence)}."
    )
    met = f"At most {p.max_observed} were met."
    ends = ", ".join(f"{value:.4f}" for value in run.quartiles)
    nodes = (
        f"<p>Accuracy of the honest nodes at the end, from lowest to highest by quarters: {ends}.</p>" if ends else ""
    )
    return (
        f"<section><h4>Certificate</h4><p>{escape(plan)} <b>Guarantee:</b> {escape(p.guarantee.meaning)}.</p>"
        f"<p>{escape(met)} {_violations(run)}</p><figure>{drawing.histogram(p.histogram, p.b_hat)}"
        "<figcaption>how often a node met that many hostile peers in a round; the line is b_hat</figcaption>"
        f"</figure>{nodes}</section>"
    )


def _violations(run: Run) -> str:
    p = run.proof
    if p.held:
        return '<span class="held">The plan held.</span>'
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
