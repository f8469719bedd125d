"""Errors of the command line and the supervisor.

CommandFailed              the command cannot do what was asked; one line for a person, exit code 1
StartFailed (oriel_wire)   something cannot start; one line that says how to fix it, exit code 2
"""


class CommandFailed(Exception):
    """The text is one line for the person at the terminal."""
