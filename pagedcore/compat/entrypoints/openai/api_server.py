"""`python -m pagedcore.entrypoints.openai.api_server --model M --host H --port P ...`: `pagedcore serve` under that name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from pagedcore import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until stopped. Flags are those of `pagedcore serve`, also with underscores; `--served-model-name` takes several names."""
    cli.main(["serve", *translate(sys.argv[1:] if arguments is None else arguments)])


def translate(arguments: Sequence[str]) -> Iterator[str]:
    """The same flags as `pagedcore serve` spells them."""
    repeated: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            flag = flag.replace("_", "-")
            repeated = None if equals or flag != "--served-model-name" else flag
            if repeated is None:
                yield flag + equals + value
        elif repeated is not None:
            yield from (repeated, argument)
        else:
            yield argument


if __name__ == "__main__":
    main()
