"""System shared memory: files under /dev/shm that clients register by name, to exchange tensors with.

The files belong to the clients, who may change, shrink or remove them at any moment. So a region keeps a descriptor and
is copied by preadv and pwrite, never mapped: a file that became too short gives fewer bytes and an error. A mapping
would end the process by SIGBUS, and a client could change a tensor after it was checked.

All calls come from the event loop, which is held for as long as a copy takes: 64 MiB, the most of one request unless
the limit of bodies is raised, take some 20 ms.
"""

import os
import stat
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest, RequestTooLarge
from oriel_wire.v2.datatypes import quoted, raw_view
from oriel_wire.v2.messages import InferResponse, RequestedOutput, SharedBytes, Tensor

MAX_NAME = MAX_REGIONS = 256
# The pages that the server is the first to write are counted as its own memory.
MAX_BYTES = 4 << 30
_FOLDER = "/dev/shm"
_RESERVED = "triton_python_backend_shm_region_"  # memory of Python models of a Triton server beside this one
_NO_DATA = np.empty(0)
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Region:
    """A registered range of a file, which is closed with the object.

    key: the file's name as the client gave it. offset: bytes of the file before the range.
    """

    name: str
    key: str
    offset: int
    size_bytes: int
    descriptor: int


class Regions:
    """All registered regions, and the size limit of one request's inputs in them. Unregistered ones stay for as long as
    requests have places for outputs in them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: dict[str, Region] = {}
        self._regions: weakref.WeakValueDictionary[str, Region] = weakref.WeakValueDictionary()

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Open a file under /dev/shm. Raises InferenceError."""
        if name in self._regions:
            raise InvalidRequest(f"shared memory region {quoted(name)} already in manager, unregister it first")
        in_use = sum([each.size_bytes for each in self._regions.values()])
        if len(self._regions) >= MAX_REGIONS or in_use + size_bytes > MAX_BYTES:
            raise InvalidRequest(
                f"shared memory region {quoted(name)}: at most {MAX_REGIONS} regions with {MAX_BYTES} bytes in all are "
                "registered at once, unregister others first"
            )
        descriptor = _open(name, key)
        within = offset >= 0 and size_bytes > 0 and offset + size_bytes <= os.fstat(descriptor).st_size
        if not within or not 0 < len(name) <= MAX_NAME:
            os.close(descriptor)
            raise InvalidRequest(
                f"failed to register shared memory region {quoted(name)}: invalid args, offset and byte_size must name "
                f"a part of the file, the name has 1 to {MAX_NAME} characters"
            )
        self._kept[name] = self._regions[name] = region = Region(name, key, offset, size_bytes, descriptor)
        weakref.finalize(region, os.close, descriptor)

    def unregister(self, name: str) -> None:
        """Close a region, or all of them if the name is empty, once no request needs it. There may be none."""
        if name:
            self._kept.pop(name, None)
        else:
            self._kept.clear()

    def status(self, name: str) -> list[Region]:
        """Return the region of that name, or all regions if it is empty. Raises InvalidRequest."""
        if name and name not in self._regions:
            raise InvalidRequest(f"Unable to find system shared memory region: {quoted(name)}")
        return [self._regions[name]] if name else list(self._regions.values())

    def find(self, place: SharedBytes) -> Region:
        """Return its region. Raises InvalidRequest for what is not in one."""
        region = self._regions.get(place.region)
        if region is None:
            raise InvalidRequest(f"Unable to find shared memory region: {quoted(place.region)}")
        if place.offset >= region.size_bytes:
            raise InvalidRequest(f"Invalid offset for shared memory region: {quoted(place.region)}")
        if place.offset + place.size_bytes >= 1 << 64:
            sizes = f"byte_size {place.size_bytes} + offset {place.offset}"
            raise InvalidRequest(f"Integer overflow detected: {sizes} of shared memory region {quoted(place.region)}")
        if place.offset + place.size_bytes > region.size_bytes:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: {quoted(place.region)}")
        return region

    def write(self, response: InferResponse, requested: Sequence[RequestedOutput] | None) -> None:
        """Write the outputs for which the client has named regions, and take their data out of the response.

        Raises InferenceError, BadMessage.
        """
        wanted = {each.name: each.shared for each in requested or () if each.shared is not None}
        for index, output in enumerate(response.outputs if wanted else ()):
            place = wanted.get(output.name)
            if place is not None:
                what = f"output {quoted(output.name)}"
                self._write(place, raw_view(output.array, output.datatype, output.shape, what), what)
                response.outputs[index] = Tensor(output.name, output.datatype, output.shape, _NO_DATA)
        response.in_shared_memory = wanted.keys()

    def _write(self, place: SharedBytes, data: bytes | memoryview, what: str) -> None:
        size = len(data)
        if size > place.size_bytes:
            raise InvalidRequest(
                f"shared memory size specified with the request for {what} ({place.size_bytes} bytes) should be at "
                f"least {size} bytes to hold the results"
            )
        region = self.find(place)
        descriptor, offset = region.descriptor, region.offset + place.offset
        if os.fstat(descriptor).st_size < offset + size:  # writing would make the file longer
            raise _shrunk(place)
        written = 0
        try:
            while written < size:
                written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)
        except OSError as error:
            raise InvalidRequest(
                f"{what}: its shared memory cannot be written, {os.strerror(error.errno or 0)}"
            ) from error


class SharedInputs:
    """Reads the inputs of one request; see `ReadShared`. size_bytes: bytes read so far."""

    __slots__ = ("_regions", "_used", "size_bytes")

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._used: list[Region] = []
        self.size_bytes = 0

    def __call__(self, place: SharedBytes) -> memoryview:
        region = self._regions.find(place)
        self._used.append(region)
        self.size_bytes += place.size_bytes
        if self.size_bytes > (limit := self._regions.limit_bytes):
            raise RequestTooLarge(f"the inputs in shared memory are larger than {limit} bytes, send fewer rows at once")
        data = np.empty(place.size_bytes, np.uint8)  # large arrays have large pages, bytes do not: half of the time
        if os.preadv(region.descriptor, [data.data], region.offset + place.offset) != place.size_bytes:
            raise _shrunk(place)
        data.flags.writeable = False
        return data.data

    def check(self, outputs: Sequence[RequestedOutput] | None) -> None:
        """Let outputs with places in regions keep all regions of the request, until it is answered.

        Raises InvalidRequest for a place that is not in a region, before the model runs.
        """
        for each in outputs or ():
            if each.shared is not None:
                self._used.append(self._regions.find(each.shared))
                each.kept = self._used


def _open(name: str, key: str) -> int:
    """Open a regular file of /dev/shm, and nothing that a link or another file system put there.

    Raises BackendFailed, because clients match on Triton's status for that, and InvalidRequest.
    """
    failed = f"Unable to open shared memory region: {quoted(key)}"
    file = key.removeprefix("/")
    if file in ("", ".", "..") or "/" in file or "\0" in file:
        raise BackendFailed(f"{failed}, it is not the name of a file under {_FOLDER}")
    if file.startswith(_RESERVED):
        which = f"shared memory region {quoted(name)} with key {quoted(key)}"
        raise InvalidRequest(f"cannot register {which} as the key contains the reserved prefix {_RESERVED!r}")
    try:
        descriptor = os.open(f"{_FOLDER}/{file}", _FLAGS)
    except (OSError, UnicodeEncodeError) as error:
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else "its name is not valid text"
        raise BackendFailed(f"{failed}, {why}") from error
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_dev != os.stat(_FOLDER).st_dev:
        os.close(descriptor)
        raise BackendFailed(f"{failed}, it is not a file of {_FOLDER}")
    return descriptor


def _shrunk(place: SharedBytes) -> InferenceError:
    return InvalidRequest(f"the file of shared memory region {quoted(place.region)} has become shorter")
