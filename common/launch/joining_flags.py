"""--join and --stop: flags of a process that finds a run which is under way, and takes its other flags from there."""

import argparse
import sys
from typing import Any

from common.errors import UserError
from common.launch import cli
from common.launch.parser import Parser


def flags_outside(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """With --join or --stop, these and the layout flags: the others are the run's, and may be left out here."""
    typed = any(word.startswith(("--join=", "--stop=")) or word in ("--join", "--stop") for word in sys.argv)
    if not typed or {"-h", "--help"} & set(sys.argv) or all(action.dest != "join" for action in parser._actions):
        return None
    known = Parser(prog=parser.prog, add_help=False)
    cli.add_layout_flags(known)
    cli.add_outside_flags(known)
    found = known.parse_known_args()[0]
    if found.stop:
        stops = Parser(prog=parser.prog)
        stops.add_argument("--stop")
        stops.add_argument("--secret-file")
        stops.add_argument("--join-timeout")
        if others := stops.parse_known_args()[1]:
            stops.error(f"{' '.join(others)}: with --stop, which takes no others than --secret-file and --join-timeout")
    return found if found.join or found.stop else None


def run_to_find(outside: argparse.Namespace) -> tuple[str, str, bytes, float]:
    """The flag that names a run, where that is, the secret, and how many seconds to wait for it."""
    flag, address = ("--stop", outside.stop) if outside.stop else ("--join", outside.join)
    return flag, address, cli.secret(outside.secret_file), outside.join_timeout


def flags_of_run(parser: argparse.ArgumentParser, told: dict[str, Any]) -> argparse.Namespace:
    """The flags that were typed here, and those of the run to join, `told`, where none was. Raises UserError where a
    flag that all must have alike differs."""
    own = cli.MAY_DIFFER | cli.LAYOUT | {"resume"}
    actions = {action.dest: action for action in parser._actions}
    if unknown := told.keys() - actions.keys() - parser._defaults.keys():
        name = unknown.pop().replace("_", "-")
        raise UserError(f"--join: the run has --{name}, unknown here: is it one of this trainer, with the same code?")
    taken = {}
    for name, value in told.items():
        if name in actions.keys() - own:
            actions[name].required = False
            taken[name] = _value_of(actions[name], value)
    args = parser.parse_args(namespace=argparse.Namespace(**taken))
    for name in ("resume", "out_dir"):
        if getattr(args, name, None) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} with --join: the run gives this machine its state and its folder: leave it out")
    for name in taken.keys() - parser.get_default("may_differ"):
        if cli.plain(typed := getattr(args, name)) != told[name]:
            flag, here, there = actions[name].option_strings[0], _in_words(typed), _in_words(taken[name])
            raise UserError(f"{flag} is {here}, but {there} in the run to join: leave it out here")
    return args


def _in_words(value: object) -> str:
    return "not given" if value is None or value is False else "given" if value is True else cli.shown(value)


def _value_of(action: argparse.Action, value: Any) -> Any:
    """The flag's value that `plain` has made `value` of."""
    if value == cli.plain(action.default):
        return action.default
    if isinstance(value, str) and callable(action.type):
        try:
            return action.type(value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise UserError(f"--join: the run has {action.option_strings[0]} {value}, which is none: {error}") from None
    return tuple(value) if isinstance(value, list) else value
