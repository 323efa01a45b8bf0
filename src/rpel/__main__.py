"""``python -m rpel`` is the command line."""

from rpel.cli import main

if __name__ == "__main__":
    main()
