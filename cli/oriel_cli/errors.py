"""What the command line and the supervisor refuse.

CommandFailed              the command cannot do what was asked; one line for a person, exit code 1
StartFailed (oriel_wire)   something cannot start; one line with the mend, exit code 2
"""

__all__ = ["CommandFailed"]


class CommandFailed(Exception):
    """The text is one line for the person at the terminal."""
