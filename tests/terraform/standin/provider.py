"""One provider: its answers to the calls of the plugin protocol."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import planning, wire
from .calls import CallLog
from .checks import out_of_order, unsettable, wrong
from .faults import Faults
from .schema import Provider, Schema, provider_message
from .values import at_path, has_unknown, known

# Answered with "unimplemented": Terraform goes on without them.
_ABSENT = {"GetMetadata", "GetFunctions", "GetResourceIdentitySchemas"}

# What a data source answers in place of its rule: attributes, or the error it ends with.
Answer = dict[str, Any] | str


class StandIn:
    def __init__(self, provider: Provider, log: CallLog, faults: Faults, answers: Mapping[str, Answer]) -> None:
        self.provider = provider
        self._log = log
        self._faults = faults
        self._answers = answers
        self._seeds = planning.Seeds()
        self._schemas = provider_message(provider)

    def answer(self, method: str, request: bytes) -> bytes | None:
        """Return the bytes of the response; None if the call is not implemented."""
        if method in _ABSENT:
            return None
        handle = getattr(self, f"_{method}", None)
        return b"" if handle is None else handle(wire.parsed(request))

    def _GetProviderSchema(self, fields: dict[int, list[Any]]) -> bytes:
        return self._schemas

    def _ValidateProviderConfig(self, fields: dict[int, list[Any]]) -> bytes:
        return self._checked(self.provider.config, fields, 1, 2)

    def _ValidateResourceConfig(self, fields: dict[int, list[Any]]) -> bytes:
        return self._checked(self._type(fields), fields, 2, 1)

    def _ValidateDataResourceConfig(self, fields: dict[int, list[Any]]) -> bytes:
        return self._checked(self._type(fields, "data."), fields, 2, 1)

    def _ConfigureProvider(self, fields: dict[int, list[Any]]) -> bytes:
        at_s = self._log.now_s()
        config = wire.decoded(wire.last(fields, 2)) or {}
        said = known({key: value for key, value in config.items() if value not in (None, [])}, "unknown")
        self._log.add("ConfigureProvider", self.provider.source, "configure", said, at_s)
        return b""

    def _UpgradeResourceState(self, fields: dict[int, list[Any]]) -> bytes:
        state = wire.last(wire.parsed(wire.last(fields, 3)), 1)  # JSON, of the version we gave
        return wire.message(1, wire.field(2, state))

    def _ReadResource(self, fields: dict[int, list[Any]]) -> bytes:
        return wire.message(1, wire.last(fields, 2))

    def _PlanResourceChange(self, fields: dict[int, list[Any]]) -> bytes:
        schema = self._type(fields)
        prior, proposed = wire.decoded(wire.last(fields, 2)), wire.decoded(wire.last(fields, 3))
        if proposed is None:
            return wire.message(1, wire.encoded(None))
        # Here, unlike when validating, values of other resources are known: what is still wrong is refused.
        config = wire.decoded(wire.last(fields, 4))
        errors = list(wrong(schema, config))
        if prior is None:  # else in a plan for a replacement what was may still stand beside what is wanted
            errors += out_of_order(schema, config)
        value, replace = planning.planned(schema, prior, proposed)
        paths = b"".join(wire.message(2, wire.message(1, wire.field(1, name))) for name in replace)
        said = wire.joined(4, (wire.diagnostic(*each) for each in errors))
        # A computed block that is not written is what the old plugin SDK does, and Terraform lets only that do it.
        legacy = wire.field(5, bool(planning.computed_blocks(schema)))
        return wire.message(1, wire.encoded(value)) + paths + said + legacy

    def _ApplyResourceChange(self, fields: dict[int, list[Any]]) -> bytes:
        at_s = self._log.now_s()
        schema = self._type(fields)
        prior, value = wire.decoded(wire.last(fields, 2)), wire.decoded(wire.last(fields, 3))
        action = "delete" if value is None else "create" if prior is None else "update"
        held = [path for path in schema.rule.protected if value is None and True in at_path(prior, path)]
        strikes = "refused" if held else self._faults.strikes(schema.name, action)
        said = f"{schema.name}: {' and '.join(held)} is true" if held else f"{schema.name}: injected fault"
        for _, refused, _ in out_of_order(schema, value):
            strikes, said = "refused", f"{schema.name}: {refused}"
        error = b"" if strikes is None else wire.message(3, wire.diagnostic(said, strikes))
        if strikes == "refused":
            self._log.add("ApplyResourceChange", schema.name, action, known(prior or value, ""), at_s, failed=True)
            return wire.message(1, wire.encoded(prior)) + error
        made = None if value is None else planning.made(schema, value, self._seeds.next(schema, value))
        if made is not None and has_unknown(made):
            raise ValueError(f"{schema.name}: still unknown after apply")
        self._log.add("ApplyResourceChange", schema.name, action, made or prior, at_s, failed=strikes is not None)
        # A thing that a refused delete left half done is still there.
        return wire.message(1, wire.encoded(prior if made is None and error else made)) + error

    def _ReadDataSource(self, fields: dict[int, list[Any]]) -> bytes:
        at_s = self._log.now_s()
        schema = self._type(fields, "data.")
        answer = self._answers.get(schema.name, {})
        if isinstance(answer, str):
            return wire.message(2, wire.diagnostic(f"{schema.name}: {answer}"))
        if answer:
            schema = replace(schema, rule=replace(schema.rule, set=schema.rule.set | answer))
        value, _ = planning.planned(schema, None, wire.decoded(wire.last(fields, 2)))
        # What is read is the same whenever it is read.
        made = planning.made(schema, value, schema.name.removeprefix("data."))
        self._log.add("ReadDataSource", schema.name, "read", made, at_s)
        return wire.message(1, wire.encoded(made))

    def _ImportResourceState(self, fields: dict[int, list[Any]]) -> bytes:
        return wire.message(2, wire.diagnostic("the stand-in does not import"))

    def _type(self, fields: dict[int, list[Any]], prefix: str = "") -> Schema:
        return self.provider.types[prefix + wire.last(fields, 1).decode()]

    def _checked(self, schema: Schema, fields: dict[int, list[Any]], config: int, diagnostics: int) -> bytes:
        written = wire.decoded(wire.last(fields, config))
        errors = [*wrong(schema, written), *unsettable(schema, written), *out_of_order(schema, written)]
        return wire.joined(diagnostics, (wire.diagnostic(*each) for each in errors))
