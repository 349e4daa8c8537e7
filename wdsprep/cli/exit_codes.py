"""The exit codes of commands that end without an error; `wdsprep.errors` has those of errors."""

DONE_WITH_DAMAGE = 3
"""The exit code of a command that has to be run again, or whose result has to be looked at."""
INTERRUPTED = 130
