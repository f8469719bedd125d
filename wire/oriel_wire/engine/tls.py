"""The certificates of a listener, reloaded while it serves.

The two files are read when their inode, size or modification time has changed. A matching pair is used for new
connections from then on; a pair that does not match is logged and the old one stays in use. The two files are rarely
replaced in one step, so an unusable pair is checked again each second and logged only once. Open connections keep the
certificate of their handshake.
"""

import asyncio
import logging
import math
import os
import ssl
from pathlib import Path

from oriel_wire.errors import StartFailed

POLL_S = 1.0
MAX_FILE_BYTES = 1024 * 1024
FLAGS = ("--tls-cert", "--tls-key", "--scaler-client-ca")
_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int, int], ...]


class Certificates:
    """One certificate chain and its key, in PEM, TLS 1.2 and later.

    http2: True if the listener's `on_http2` takes connections; then ALPN offers `h2` before `http/1.1`.
    authority: clients have to show a certificate that this one (PEM) signed.
    flags: the flags that name chain, key and authority, for errors.
    context: the TLS context for the listener; it hands each new connection to the pair in force. pem: (chain, key) of
    that pair. expires_at: the time when the first certificate of its chain ends, seconds since the epoch.
    Single writer: the task that runs `watch`. Raises StartFailed if there is no usable pair.
    """

    def __init__(
        self,
        chain: Path,
        key: Path,
        *,
        http2: bool = False,
        authority: Path | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        flags: tuple[str, str, str] = FLAGS,
    ) -> None:
        self._chain = chain
        self._authority = authority
        self._max_file_bytes = max_file_bytes
        self._key = key
        self._protocols = ["h2", "http/1.1"] if http2 else ["http/1.1"]
        self._named: _Stamp | None = None  # the unusable pair that was logged last; () if the files cannot be read
        if authority is not None:
            try:
                ssl.create_default_context(cafile=authority)
            except OSError as error:
                raise StartFailed(f"{flags[2]} cannot be read: {error.strerror or 'it is not PEM'}") from error
        try:
            self._stamp = self._read_stamp()
            current, self.pem = self._read()
        except (OSError, ValueError) as error:
            raise StartFailed(
                f"the certificate of {flags[0]} and the key of {flags[1]} are not usable: {_reason(error)}"
            ) from error
        # The context of a listener cannot be replaced; the context of each handshake can.
        self.context = self._current = current
        self.expires_at = _expires_at(self.pem[0])
        self.context.sni_callback = self._use_current_certificate

    def _use_current_certificate(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    async def watch(self) -> None:
        """Poll the files each second, on a thread; never returns."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.poll)

    def poll(self) -> bool:
        """Load the files if they have changed and match; returns whether they were loaded."""
        stamp: _Stamp = ()
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return False
            current, pem = self._read()
            if self._read_stamp() != stamp:
                return False  # being replaced: the next poll sees the whole file
        except (OSError, ValueError) as error:
            if stamp != self._named:
                _log.error("the new certificate or key is not usable, the old pair stays in use: %s", _reason(error))
            self._named = stamp
            return False
        self._stamp, self._named = stamp, None
        self._current, self.pem, self.expires_at = current, pem, _expires_at(pem[0])
        _log.info("a new certificate is in force for new connections")
        return True

    def _read_stamp(self) -> _Stamp:
        found = [os.stat(path) for path in (self._chain, self._key)]
        return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found)

    def _read(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
        if any(path.stat().st_size > self._max_file_bytes for path in (self._chain, self._key)):
            raise ValueError(f"a file is larger than {self._max_file_bytes} bytes")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _restrict(context)
        context.set_alpn_protocols(self._protocols)
        context.load_cert_chain(self._chain, self._key, password=_no_password)
        if self._authority is not None:
            context.load_verify_locations(self._authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context, (self._chain.read_bytes(), self._key.read_bytes())


def _expires_at(chain: bytes) -> float:
    """The end of validity; NaN for a certificate that OpenSSL accepts and this parser does not."""
    from cryptography import x509  # 10 MB, paid for by listeners with a certificate only

    try:
        return min(each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(chain))
    except ValueError:
        return math.nan


def _restrict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A renegotiating or compressing client costs much and gains nothing.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE


def _no_password() -> str:
    raise ValueError("the key is encrypted; store it without a pass phrase")


def _reason(error: Exception) -> str:
    """The error's text without the path, which may name a secret."""
    if isinstance(error, ssl.SSLError):
        words = (error.reason or "").replace("_", " ").lower()
        return {"key values mismatch": "the key is not the certificate's"}.get(words) or words or "not PEM"
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return str(error)
