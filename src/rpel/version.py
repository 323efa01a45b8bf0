"""The version, written once.

The package's metadata, ``rpel.__version__`` and certificates take it from here.
"""

__version__ = "0.4.0"
