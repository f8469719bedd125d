"""The settings of the logging extension: which lines this process writes to its log.

`log_info`, `log_warning` and `log_error` switch those lines on and off; `log_verbose_level` above 0 adds debug lines.
The destination of the log, stderr or the file given at the start, does not change. Lines carry ISO 8601 times, so both
names of `log_format` mean the same form.
"""

import logging
from collections.abc import Mapping

from oriel_inference.errors import InvalidRequest, NotSupported
from oriel_wire.v2.datatypes import quoted

Setting = bool | int | str

_LOGGERS = ("oriel_inference", "oriel_wire")
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
        if self._values["log_verbose_level"]:
            level = logging.DEBUG
        elif self._values["log_info"]:
            level = logging.INFO
        else:
            level = logging.WARNING if self._values["log_warning"] else logging.ERROR
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
        if record.levelno >= logging.ERROR:
            name = "log_error"
        elif record.levelno >= logging.WARNING:
            name = "log_warning"
        else:
            name = "log_info" if record.levelno >= logging.INFO else "log_verbose_level"
        return bool(self._values[name])
