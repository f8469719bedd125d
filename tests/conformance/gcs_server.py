"""gcp-storage-emulator with the other requests that a client of Google Cloud Storage makes.

Run by build/stores/bin/python. The emulator from PyPI keeps the objects and speaks the JSON API, but serves one request
at a time and has no pages, ETags or conditions. obstore speaks the XML API, so this module adds its listing in pages,
and GET, HEAD and PUT with ETag, Range and If-Match, as described in Google's reference. The bucket `forbidden` answers
403. The server prints its port and serves until it is killed.
"""

import hashlib
import sys
from email.utils import formatdate
from functools import partial
from http.server import ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

PAGE = 50  # must equal object_stores.PAGE
ONE_AT_A_TIME = Lock()  # the emulator's storage is not safe for threads


class Memory(Storage):
    def _write_config_to_file(self) -> None:
        """Write nothing: the emulator would write the list of all objects after each new one, and no test reads it."""


def bucket_and_key(path: str) -> tuple[str, str]:
    bucket, _, key = path.lstrip("/").partition("/")
    return unquote(bucket), unquote(key)


class Handler(RequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._xml(body=True)

    def do_HEAD(self) -> None:
        self._xml(body=False)

    def do_PUT(self) -> None:
        parts = urlsplit(self.path)
        bucket, key = bucket_and_key(parts.path)
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        etag = hashlib.md5(data).hexdigest()
        about = {"name": key, "bucket": bucket, "size": str(len(data)), "etag": etag, "contentType": None}
        with ONE_AT_A_TIME:
            if not key:
                self.storage.create_bucket(bucket, {"name": bucket})
            elif self.headers.get("x-goog-if-generation-match") == "0" and self._is_there(bucket, key):
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", {})
            else:
                self.storage.create_file(bucket, key, data, about)
        self._answer(200, b"", {"ETag": f'"{etag}"'})

    def _is_there(self, bucket: str, key: str) -> bool:
        try:
            self.storage.get_file_obj(bucket, key)
        except NotFound:
            return False
        return True

    def do_DELETE(self) -> None:
        with ONE_AT_A_TIME:
            self.storage.delete_file(*bucket_and_key(self.path))
        self._answer(204, b"", {})

    def _xml(self, *, body: bool) -> None:
        parts = urlsplit(self.path)
        bucket, key = bucket_and_key(parts.path)
        if bucket == "forbidden":
            return self._answer(403, b"<Error><Code>AccessDenied</Code></Error>", {}, body=body)
        try:
            with ONE_AT_A_TIME:
                if not key:
                    return self._answer(200, self._listing(bucket, parse_qs(parts.query)), {})
                about = self.storage.get_file_obj(bucket, key)
                data = self.storage.get_file(bucket, key)
        except NotFound:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {}, body=body)
        etag = f'"{about["etag"]}"'
        if self.headers.get("If-Match", etag) != etag:
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", {}, body=body)
        headers = {"ETag": etag, "Last-Modified": formatdate(0, usegmt=True), "x-goog-generation": "1"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._answer(200, data, headers, body=body)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(len(data), int(last) + 1 if last else len(data))
        if start >= len(data):
            return self._answer(416, b"<Error><Code>InvalidRange</Code></Error>", {}, body=body)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return self._answer(206, data[start:end], headers, body=body)

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        files, _ = self.storage.get_file_list(bucket, query.get("prefix", [""])[0] or None, None)
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        files = sorted((each for each in files if each["name"] > after), key=lambda each: each["name"])
        page = files[: int(query.get("max-keys", [str(PAGE)])[0])]
        rows = "".join(
            f"<Contents><Key>{escape(each['name'])}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{each['etag']}&quot;</ETag><Size>{each['size']}</Size></Contents>"
            for each in page
        )
        more = escape(page[-1]["name"]) if len(page) < len(files) else ""
        token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult>{rows}{token}</ListBucketResult>".encode()

    def _answer(self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, Memory(use_memory_fs=True)))
    sys.stdout.write(f"listening on {server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
