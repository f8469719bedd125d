"""The settings of the logging extension: which lines this process writes to its log.

`log_info`, `log_warning` and `log_error` switch those lines on and off; `log_verbose_level` above 0 adds debug lines.
The destination of the log, stderr or the file given at the start, does not change. Lines carry ISO 8601 times, so both
names of `log_format` mean the same form; JSON records are chosen at the start.
"""

import logging
from collections.abc import Mapping

from oriel_inference.errors import InvalidRequest, NotSupported
from oriel_wire.v2.datatypes import quoted

Setting = bool | int | str

_LOGGERS = ("oriel_inference", "oriel_wire")
# setting -> the level from which its lines are, up to that of the next one
_LEVELS = {
    "log_verbose_level": logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
_FORMATS = ("default", "ISO8601")
_MAX_LEVEL = 2**31 - 1


class LogSettings:
    """Applies to the handlers that the root logger has now, until `close`. Single writer: the loop."""

    def __init__(self, file: str = "") -> None:
        log = logging.getLogger(_LOGGERS[0])
        self._values: dict[str, Setting] = {
            "log_file": file,
            "log_info": log.isEnabledFor(logging.INFO),
            "log_warning": log.isEnabledFor(logging.WARNING),
            "log_error": True,
            "log_verbose_level": int(log.isEnabledFor(logging.DEBUG)),
            "log_format": "default",
        }
        self._handlers = tuple(logging.getLogger().handlers)
        self._levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        for handler in self._handlers:
            handler.addFilter(self._wanted)

    def close(self) -> None:
        """Restore logging as it was."""
        for handler in self._handlers:
            handler.removeFilter(self._wanted)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def shown(self) -> dict[str, Setting]:
        """Return all settings by their names."""
        return dict(self._values)

    def change(self, settings: Mapping[str, object]) -> None:
        """Set all given settings, or none. Raises InvalidRequest, and NotSupported for `log_file`."""
        changed = {name: self._checked(name, value) for name, value in settings.items()}
        if not changed:
            return
        self._values |= changed
        level = next((level for name, level in _LEVELS.items() if self._values[name]), logging.ERROR)
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(level)

    def _checked(self, name: str, value: object) -> Setting:
        if name == "log_file":
            raise NotSupported(
                "log file location can not be updated through network protocol: pass --log-file at the start"
            )
        if name == "log_format":
            if not isinstance(value, str) or value not in _FORMATS:
                raise InvalidRequest(f"log_format must be one of {', '.join(_FORMATS)}")
            return value
        if name == "log_verbose_level":
            if type(value) is not int or not 0 <= value <= _MAX_LEVEL:
                raise InvalidRequest("log_verbose_level must be a whole number, 0 or more")
            return value
        if name not in self._values:
            raise InvalidRequest(f"unknown log setting {quoted(name)}, there are {', '.join(self._values)}")
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false")
        return value

    def _wanted(self, record: logging.LogRecord) -> bool:
        names = (name for name, level in reversed(_LEVELS.items()) if record.levelno >= level)
        return bool(self._values[next(names, "log_verbose_level")])
