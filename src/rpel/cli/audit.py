"""``rpel audit``: membership inference, and a lower bound on ε."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.text import number

if TYPE_CHECKING:
    from rpel.studies.audit import Findings, Point


@opt.described
def audit(
    run: Path, victim: Annotated[int, Option(min=0)] = 0, canaries: int = 200, shadows: int = 0,
    points: int = 12, seed: int = 0, delta: float | None = None, without_clipping: bool = False,
    plot: opt.Plot = None, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Play a run again and guess, from half-steps that a member pulled, which examples the victim has.

    Each of the victim's examples is left out by a coin. By the loss of the model seen last: AUC, and true
    positives (TPR) at 1 % false positives. By canaries: a lower bound on epsilon, which must stay below what
    the run states. Once for a member that sees the victim in every round,
    once for one that meets it by the plan's draws.

    Example: rpel audit runs/quickstart-0123456789ab --plot attack.svg

    Arguments:
        run (RUN): A run folder; finished or not.

    Options:
        victim: Which of the honest nodes is attacked.
        canaries: Examples put beside the victim's, by coins, to be guessed.
        shadows: Further runs for the likelihood ratio, an even number.
        points: Rounds at which the curves are drawn.
        seed: Seed for choosing canaries and examples that are left out.
        delta: Of the audit, by default the run's.
        without_clipping: Break the run on purpose: the bound must then pass what is stated.
    """
    from rpel.spec import load_folder
    from rpel.studies import audit as audits
    from rpel.studies.plots import save

    spec = load_folder(run)
    with terminal.display() as shown:

        def progress(what: str, done: int, rounds: int) -> None:
            if shown.console.is_terminal:
                shown.update(what, done, rounds, "")
            elif done == rounds or done * 10 // rounds > (done - 1) * 10 // rounds:
                shown.say(f"{what}: round {done}/{rounds}")

        findings = audits.attack(
            spec, victim=victim, canaries=canaries, shadows=shadows, points=points, seed=seed,
            delta=delta, clipping=not without_clipping, progress=progress, download=shown.download,
        )  # fmt: skip
    if plot is not None:
        save(audits.drawing(findings), plot)
    if not terminal.printed({"run": str(run), **findings.to_dict()}, as_json):
        _print(findings)
    if findings.holds is False and findings.clipped:
        raise typer.Exit(1)


def _print(findings: "Findings") -> None:
    print(
        f"victim: node {findings.victim}, {findings.included} of {findings.examples} examples there, "
        f"{findings.canaries} canaries; curious: node {findings.member}"
    )
    ratio = ("ratio: AUC", "TPR 1%") if findings.shadows else ()
    names = ("round", "met", "loss: AUC", "TPR", *ratio, "canaries", "epsilon >=", "stated")
    for name, points in findings.curves.items():
        table = terminal.table(*names, right=names, title=f"a member that sees it {name}")
        for point, stated in zip(points, findings.stated, strict=True):
            table.add_row(*_cells(point, bool(ratio)), number(stated, ".3f", missing="none"))
        terminal.stdout(wrap=True).print(table)
    print(_verdict(findings))


def _cells(point: "Point", ratio: bool) -> list[str]:
    more = [point.ratio_auc, point.ratio_tpr] if ratio else []
    shown = [point.auc, point.tpr, *more, point.canary_auc, point.epsilon_low]
    numbers = [number(value if value == value else None, ".3f") for value in shown]  # nan: not known
    return [str(point.round), str(point.met), *numbers]


def _verdict(findings: "Findings") -> str:
    sure = f"(delta {findings.delta:g}, {findings.confidence:.0%} sure)"
    bound = f"epsilon is at least {findings.epsilon_low:.3f} {sure}"
    stated = findings.stated[-1]
    if stated is None or findings.holds is None:
        return f"{bound}; this run states none"
    if findings.holds:
        verdict = f"{bound}, and {stated:.3f} is stated: nothing speaks against it"
        if findings.most <= stated:
            verdict += f"; {findings.canaries} canaries can show at most {findings.most:.2f}"
        if not findings.clipped:
            verdict += ": WITHOUT CLIPPING THE AUDIT SHOULD HAVE SHOWN MORE"
        return verdict
    if findings.clipped:
        return f"{bound}, MORE THAN THE {stated:.3f} STATED: not as private as it says, if --seed 1 agrees"
    return f"{bound}, more than the {stated:.3f} stated with clipping: so the audit finds what is broken"
