"""The `longstraw` command. Exit codes: 0 done as asked, 1 a check failed or a run broke off, 2 bad input."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from longstraw_jax.cli.bench import Bench
from longstraw_jax.cli.demo import Demo
from longstraw_jax.cli.plan import PlanCommand
from longstraw_jax.cli.step import Step
from longstraw_jax.cli.verify import Verify
from longstraw_jax.errors import InputError, LongstrawError, UnsupportedError

Command = (
    Annotated[Step, tyro.conf.subcommand("step")] | Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Verify, tyro.conf.subcommand("verify")] | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console command; leaves through SystemExit."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's chatter about the machine
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # and transformers' about what is not installed
    command = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code = command.run()
    except (InputError, UnsupportedError) as error:
        _fail(str(error), 2)
    except LongstrawError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written after the last message", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain once more on its way out
        code = 1
    raise SystemExit(code)


def _fail(message: str, code: int) -> None:
    print(f"longstraw: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _parse(arguments: Sequence[str]) -> Command:
    """Parses the command line; a mistake in it becomes one line instead of a box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Command, prog="longstraw", args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        _fail(_one_line(said.getvalue()), 2)


def _one_line(box: str) -> str:
    lines = [line.strip("│ ").strip() for line in box.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("╭", "╰", "─", "For full helptext", "Argument helptext"))]
    return "; ".join(kept[:4]) + "; see longstraw --help"
