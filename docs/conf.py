"""The site: `make docs` builds it into site/; pages are executed, warnings and dead links are errors."""

import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rpel.version import __version__

here = str(Path(__file__).parent.resolve())
# for pages' kernels
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))

project = "rpel"
author = "The rpel authors"
copyright = "The rpel authors, MIT licence"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "_ext.generated",
]
exclude_patterns = ["results/paper", "_ext", "_generated"]
templates_path: list[str] = []

html_theme = "furo"
html_title = f"rpel {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("pull.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False

myst_enable_extensions = ["deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
html_math_renderer = "text"  # formulas are written as text: the site asks no other server for anything

# A page that fails fails the build. Each runs in a folder of its own, so pages cannot lean on each other.
# What a page printed is kept by its code and the code of rpel, so that a change of words executes nothing.
_kinds = ("../src/rpel/**/*.py", "../src/rpel/**/*.toml", "**/*.py")
_sources = [path for kind in _kinds for path in sorted(Path(here).glob(kind))]
_digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in _sources)).hexdigest()[:16]
_cache = Path(here).parent / ".docs-cache"
# of other code, not used for a week; a younger one may belong to a build beside this
for _old in _cache.glob("*"):
    if _old.name != _digest and _old.stat().st_mtime < time.time() - 7 * 86400:
        shutil.rmtree(_old)
nb_execution_mode = "cache"
nb_execution_cache_path = str(_cache / _digest)
nb_execution_raise_on_error = True
nb_execution_timeout = 3600  # a busy machine gives real peers longer rounds
nb_execution_in_temp = True
nb_execution_show_tb = True
nb_merge_streams = True

_startup = Path(tempfile.mkdtemp(prefix="rpel-docs-")) / "profile_default" / "startup"
_startup.mkdir(parents=True)
shutil.copy(Path(__file__).parent / "_ext" / "kernel.py", _startup / "kernel.py")
# errors only
(_startup.parent / "ipython_kernel_config.py").write_text("get_config().Application.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(_startup.parents[1])
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # pages are not debugged
logging.getLogger("traitlets").setLevel(logging.WARNING)

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
suppress_warnings = ["mystnb.unknown_mime_type"]
nitpicky = False
