"""Environments that one virtual environment cannot hold, and files made by other tools.

`make test-all` runs the sessions that test; `nox -l` lists them all.
"""

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["trainers", "trackers", "flower", "opacus"]
TEST = ("pytest", "hypothesis", "pytest-xdist")
LOCK = "deploy/requirements.lock"


def run_tests(session: nox.Session, *paths: str) -> None:
    """Run test files with every marker, as the last step of a session."""
    session.run("python", "-m", "pytest", "-q", "-m", "", *(session.posargs or paths))


@nox.session
def trainers(session: nox.Session) -> None:
    """Test the callbacks for Hugging Face and Lightning, and Hugging Face data sets."""
    libraries = ("transformers", "peft", "accelerate", "lightning", "datasets")
    session.install("-c", "constraints.txt", "-e", ".[dev]", *libraries)
    run_tests(
        session, "-W", "ignore", "tests/integrations/test_trainers.py", "tests/promises/test_hugging_face.py"
    )


@nox.session
def trackers(session: nox.Session) -> None:
    """Test the callbacks for MLflow and Weights & Biases."""
    session.install("-e", ".", "torch==2.13.0", "mlflow", "wandb", *TEST)
    run_tests(session, "-W", "ignore", "tests/integrations/test_trackers.py")


@nox.session
def flower(session: nox.Session) -> None:
    """Test the strategy for Flower in its own simulator."""
    session.install("-e", ".", "torch==2.13.0", "flwr[simulation]==1.41.0", *TEST)
    run_tests(session, "-W", "ignore", "tests/integrations/test_flower.py")


@nox.session
def opacus(session: nox.Session) -> None:
    """Compare private gradients and the accountant with Opacus."""
    session.install("-e", ".[privacy]", "torch==2.13.0", "opacus==1.6.0", *TEST)
    run_tests(session, "-W", "ignore", "tests/integrations/test_opacus.py")


@nox.session
def lock(session: nox.Session) -> None:
    """Pin what a deployment installs, with hashes."""
    session.install("uv")
    platform = ("--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu")
    session.run(
        "uv", "pip", "compile", "-q", "pyproject.toml", "-c", "constraints.txt", "--generate-hashes",
        "--no-annotate", *platform, "--custom-compile-command", "nox -s lock", "-o", LOCK,
    )  # fmt: skip


@nox.session
def sbom(session: nox.Session) -> None:
    """Write a bill of materials (CycloneDX) of a deployment."""
    session.install("cyclonedx-bom")
    session.run("cyclonedx-py", "requirements", "--pyproject", "pyproject.toml", LOCK, "-o", "rpel.cdx.json")
