"""The command line: `python -m circuits counting diagnose --model tiny --out DIR`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from interp.errors import InputError

STUDIES = {"counting": "where does visual counting break? (arXiv:2605.30170)"}


def main(arguments: Sequence[str]) -> int:
    """Run a command; bad input is one line on standard error and exit code 2."""
    study, *rest = arguments or ["--help"]
    if study in ("-h", "--help"):
        lines = [f"  {name:12} {what}" for name, what in STUDIES.items()]
        print("\n".join(["usage: python -m circuits STUDY COMMAND [options]", "", *lines]))
        return 0
    try:
        if study not in STUDIES:
            raise InputError(f"no study {study!r}; there are {', '.join(STUDIES)}")
        return import_module(f"circuits.{study}.commands").main(rest)
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it stood", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
