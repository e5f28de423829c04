"""Dockerfiles as tests read them: stages of instructions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

_CONTINUED = re.compile(r"\\\n")


@dataclass(slots=True)
class Stage:
    """From one FROM to the next: (instruction, what follows it), in order."""

    image: str
    name: str | None
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """What follows each instruction of that kind."""
        return [rest for kind, rest in self.instructions if kind == instruction]

    def one(self, instruction: str) -> str:
        """What follows the only instruction of that kind."""
        (rest,) = self.all(instruction)
        return rest

    def command(self, instruction: str) -> list[str]:
        """The argument list of an ENTRYPOINT or HEALTHCHECK, which must be in exec form."""
        return list(json.loads(self.one(instruction).rpartition("CMD ")[2]))


def stages(file: Path) -> list[Stage]:
    """The stages of a Dockerfile, the one that becomes the image last."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in _CONTINUED.sub(" ", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        kind, _, rest = line.strip().partition(" ")
        if kind == "FROM":
            image, _, name = rest.partition(" AS ")
            found.append(Stage(image, name or None))
        else:
            found[-1].instructions.append((kind, rest.strip()))
    return found
