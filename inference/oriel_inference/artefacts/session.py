"""The session of an artefact in service: a run in which the artefact fails is done by the reference."""

from collections.abc import Callable, Mapping, Sequence

from oriel_inference.backends import OutsideProfile, Session
from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest
from oriel_wire.v2.messages import Array


class CompiledSession(Session):
    """One instance. reference: stays open beside it, owned by the caller.

    failed: called, in the thread of the run, after the reference has answered what the artefact could not. A run that
    the reference cannot do either says nothing about the artefact.
    """

    def __init__(self, artefact: Session, reference: Session, failed: Callable[[InferenceError], None]) -> None:
        self._artefact = artefact
        self._reference = reference
        self._failed = failed
        self.provider, self.inputs, self.outputs = artefact.provider, artefact.inputs, artefact.outputs

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        try:
            return self._artefact.run(inputs, outputs)
        except OutsideProfile:  # the artefact was made for other shapes or values, and is not to blame
            return self._reference.run(inputs, outputs)
        except (BackendFailed, InvalidRequest) as error:
            results = self._reference.run(inputs, outputs)
            self._failed(error)
            return results

    def close(self) -> None:
        """Close the artefact's session; the reference stays open."""
        self._artefact.close()
