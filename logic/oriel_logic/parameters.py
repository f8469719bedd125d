"""The parameters of a function as it was written, whether or not its annotations can be looked up.

From Python 3.14 on annotations are evaluated when they are asked for, and `inspect.signature` asks for all of them: one
name that exists for type checkers only would fail a handler that never uses it.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["python_signature"]

if sys.version_info >= (3, 14):
    from annotationlib import Format

    def python_signature(function: Callable[..., Any]) -> inspect.Signature:
        """As inspect.signature; an annotation that cannot be looked up is a ForwardRef.

        Raises TypeError and ValueError.
        """
        return inspect.signature(function, annotation_format=Format.FORWARDREF)

else:

    def python_signature(function: Callable[..., Any]) -> inspect.Signature:
        """As inspect.signature. Raises TypeError and ValueError."""
        return inspect.signature(function)
