"""The commands of the command line: a name, the module that acts on it, and a line for `--help`.

A module has three things, and nothing is imported for a command but its own module:

- ``EPILOG``: examples and exit codes, shown at the end of ``kvd COMMAND --help``;
- ``add_arguments(parser)``: its options;
- ``run(options) -> int``: does it and returns the exit code; a KvdError becomes one line on stderr
  and exit code 2.

What a module imports at its head must be light; the rest waits until `run` needs it
(tests/test_imports.py has the list). A command that has JSON to show calls its option `--json`.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Command(NamedTuple):
    """One command: its module, and what it does in a few words."""

    module: str
    what: str


COMMANDS: Final[dict[str, Command]] = {
    "serve": Command("kvd.commands.serve", "run the daemon"),
    "stat": Command("kvd.commands.stat", "show what the daemon holds and does"),
    "ls": Command("kvd.commands.ls", "list the namespaces, or the chunks of one"),
    "pin": Command("kvd.commands.pin", "keep a namespace or a chain in host memory for a time"),
    "unpin": Command("kvd.commands.unpin", "end pins"),
    "evict": Command("kvd.commands.evict", "give up chunks by namespace, tenant and last use"),
    "warm": Command("kvd.commands.warm", "bring up from NVMe what was used last"),
    "record": Command("kvd.commands.record", "write a trace of what engines ask for"),
    "drain": Command("kvd.commands.drain", "let the daemon finish, write down and end"),
    "doctor": Command("kvd.commands.doctor", "say what this host lacks, and how to mend it"),
    "plan": Command("kvd.commands.plan", "load or compute, chunk size, and what a fleet must hold"),
    "check": Command("kvd.check", "verify every byte of an NVMe tier, offline"),
    "replay": Command("kvd.replay_cli", "replay a trace against policies and sizes"),
    "http": Command("kvd.http.main", "serve metrics and a status page of the daemon"),
    "events": Command("kvd.commands.events", "show what enters and leaves the daemon's tiers"),
    "install-service": Command("kvd.install_service", "write the systemd units of the daemon"),
    "demo": Command("kvd.demo.main", "show engines sharing one cache, in memory and on NVMe"),
    "completion": Command("kvd.commands.completion", "print the shell's set-up for Tab"),
    "version": Command("kvd.commands.version", "print the version"),
}
"""In the order in which `kvd --help` lists them."""
