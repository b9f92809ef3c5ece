"""`python -m jax_grpo COMMAND --flag=value ...`: one module of `commands/` for each command."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

from absl import flags

from jax_grpo import commands
from jax_grpo.commands import BadInput, refusing_bad_input

# absl's own logging prefix and transformers' advice have no place between our lines.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def command_names() -> list[str]:
    """The commands that there are: the modules of `commands/`, but for what they share."""
    modules = (module.name for module in pkgutil.iter_modules(commands.__path__))
    return [name for name in modules if name not in ("common", "inputs", "recipe", "stage")]


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Args:
      argv: program, command, flags.

    Returns:
      The exit code: 0, or 2 after one line on stderr for what cannot be used.
    """
    names = command_names()
    usage = f"usage: python -m jax_grpo COMMAND --flag=value ...; commands: {', '.join(names)}"
    if len(argv) > 1 and argv[1] in ("-h", "--help", "help"):
        print(usage + "\nhelp of one: python -m jax_grpo COMMAND --help")
        return 0
    if len(argv) < 2 or argv[1] not in names:
        what = f"no command {argv[1]!r}; " if len(argv) > 1 else ""
        print(f"jax_grpo: {what}{usage}", file=sys.stderr)
        return 2
    name = argv[1]
    command = importlib.import_module(f"jax_grpo.commands.{name}")
    line = [f"jax_grpo {name}", *argv[2:]]
    values = flags.FlagValues()
    try:
        with refusing_bad_input():
            command.define_flags(values, line)
        if any(arg in ("-h", "--help") for arg in argv[2:]):
            print(f"{command.__doc__}\n{values.main_module_help() or values.get_help()}")
            return 0
        with refusing_bad_input():
            rest = values(line)
            if rest[1:]:
                raise ValueError(f"not a flag: {' '.join(rest[1:])} (flags are --name=value)")
        return command.run(values)
    except BadInput as error:
        print(f"jax_grpo {name}: {error}", file=sys.stderr)
        return 2


def entry() -> None:
    """Runs the command line that the process was started with."""
    sys.exit(main(sys.argv))


if __name__ == "__main__":
    entry()
