"""Requests that servers of HTTP/1.1 may read in different ways, and why they do; one case each.

`WHY` has a reason for exactly those cases in which nginx or h11 differs from Oriel; `test_http1` checks that.
"""

from typing import NamedTuple

__all__ = ["CASES", "WHY", "Case"]


class Case(NamedTuple):
    """The bytes of one connection."""

    group: str
    name: str
    data: bytes

    @property
    def why(self) -> str:
        return WHY.get(f"{self.group}: {self.name}", "")


KEY = b"x-api-key: key-gold\r\n"


def get(target: bytes = b"/v2", *lines: bytes, method: bytes = b"GET", version: bytes = b"HTTP/1.1") -> bytes:
    """Return a GET head that every server accepts, with the given changes."""
    return b"%b %b %b\r\nHost: x\r\n%b%b\r\n" % (
        method,
        target,
        version,
        KEY,
        b"".join(line + b"\r\n" for line in lines),
    )


def post(*lines: bytes, body: bytes = b"", version: bytes = b"HTTP/1.1") -> bytes:
    """Return the same head with a body."""
    return get(b"/v2/models/digits/infer", *lines, method=b"POST", version=version) + body


def raw(head: bytes) -> bytes:
    """Return a head with this request line and this Host."""
    return head + KEY + b"\r\n"


CHUNKED = b"Transfer-Encoding: chunked"
ONE = b"3\r\nabc\r\n0\r\n\r\n"
CASES: tuple[Case, ...] = (
    # Content-Length and Transfer-Encoding ----------------------------------------------------------------------------
    Case("framing", "no body", get()),
    Case("framing", "Content-Length", post(b"Content-Length: 3", body=b"abc")),
    Case("framing", "Content-Length: 0", post(b"Content-Length: 0")),
    Case("framing", "POST without a length", post()),
    Case("framing", "GET with a body", get(b"/v2", b"Content-Length: 3") + b"abc"),
    Case("framing", "chunked", post(CHUNKED, body=ONE)),
    Case("framing", "CHUNKED in capitals", post(b"TRANSFER-ENCODING: CHUNKED", body=ONE)),
    Case("framing", "Content-Length twice, equal", post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc")),
    Case("framing", "Content-Length twice, different", post(b"Content-Length: 3", b"Content-Length: 4", body=b"abcd")),
    Case("framing", "Content-Length list", post(b"Content-Length: 3, 3", body=b"abc")),
    Case("framing", "Content-Length with a sign", post(b"Content-Length: +3", body=b"abc")),
    Case("framing", "Content-Length negative", post(b"Content-Length: -3", body=b"abc")),
    Case("framing", "Content-Length in hex", post(b"Content-Length: 0x3", body=b"abc")),
    Case("framing", "Content-Length with leading zeros", post(b"Content-Length: 003", body=b"abc")),
    Case("framing", "Content-Length empty", post(b"Content-Length:", body=b"abc")),
    Case("framing", "Content-Length of twenty digits", post(b"Content-Length: 99999999999999999999", body=b"abc")),
    Case("framing", "Content-Length with a space inside", post(b"Content-Length: 1 2", body=b"abcdefghijkl")),
    Case("framing", "Content-Length, then chunked", post(b"Content-Length: 3", CHUNKED, body=ONE)),
    Case("framing", "chunked, then Content-Length", post(CHUNKED, b"Content-Length: 3", body=ONE)),
    Case("framing", "chunked twice", post(CHUNKED, CHUNKED, body=ONE)),
    Case("framing", "gzip, chunked", post(b"Transfer-Encoding: gzip, chunked", body=ONE)),
    Case("framing", "chunked, identity", post(b"Transfer-Encoding: chunked, identity", body=ONE)),
    Case("framing", "identity", post(b"Transfer-Encoding: identity", b"Content-Length: 3", body=b"abc")),
    Case("framing", "an unknown coding", post(b"Transfer-Encoding: xchunked", body=ONE)),
    Case("framing", "chunked after a vertical tab", post(b"Transfer-Encoding:\x0bchunked", body=ONE)),
    Case("framing", "chunked in quotes", post(b'Transfer-Encoding: "chunked"', body=ONE)),
    Case("framing", "Transfer-Encoding empty", post(b"Transfer-Encoding:", body=ONE)),
    Case("framing", "chunked in HTTP/1.0", post(CHUNKED, body=ONE, version=b"HTTP/1.0")),
    Case("framing", "space before the colon of Transfer-Encoding", post(b"Transfer-Encoding : chunked", body=ONE)),
    Case("framing", "underscores: Content_Length beside none", post(b"Content_Length: 3")),
    Case("framing", "Connection names Content-Length",
         post(b"Connection: content-length", b"Content-Length: 3", body=b"abc")),
    # Chunks -----------------------------------------------------------------------------------------------------------
    Case("chunks", "an extension", post(CHUNKED, body=b"3;a=b\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "a quoted extension", post(CHUNKED, body=b'3;a="b;c"\r\nabc\r\n0\r\n\r\n')),
    Case("chunks", "space before an extension", post(CHUNKED, body=b"3 ;a\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "LF in an extension", post(CHUNKED, body=b"3;a\nabc\r\n0\r\n\r\n")),
    Case("chunks", "NUL in an extension", post(CHUNKED, body=b"3;a\x00b\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "an extension of 1000 bytes", post(CHUNKED, body=b"3;" + b"a" * 1000 + b"\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "sizes with leading zeros", post(CHUNKED, body=b"0003\r\nabc\r\n0000\r\n\r\n")),
    Case("chunks", "a size of nine digits", post(CHUNKED, body=b"000000003\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "a size of seventeen digits", post(CHUNKED, body=b"10000000000000003\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "a size with 0x", post(CHUNKED, body=b"0x3\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "a size with a sign", post(CHUNKED, body=b"+3\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "a size after a space", post(CHUNKED, body=b" 3\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "an empty size", post(CHUNKED, body=b"\r\nabc\r\n0\r\n\r\n")),
    Case("chunks", "LF after a size", post(CHUNKED, body=b"3\nabc\r\n0\r\n\r\n")),
    Case("chunks", "more data than the size", post(CHUNKED, body=b"3\r\nabcd\r\n0\r\n\r\n")),
    Case("chunks", "less data than the size", post(CHUNKED, body=b"5\r\nabc\r\n0\r\n\r\n" + get())),
    Case("chunks", "LF after data", post(CHUNKED, body=b"3\r\nabc\n0\r\n\r\n")),
    Case("chunks", "a trailer", post(CHUNKED, body=b"3\r\nabc\r\n0\r\nX-T: 1\r\n\r\n")),
    Case("chunks", "a trailer Content-Length", post(CHUNKED, body=b"3\r\nabc\r\n0\r\nContent-Length: 9\r\n\r\n")),
    Case("chunks", "a trailer that is no field", post(CHUNKED, body=b"3\r\nabc\r\n0\r\nno field\r\n\r\n")),
    Case("chunks", "a trailer with LF", post(CHUNKED, body=b"3\r\nabc\r\n0\r\nX-T: 1\n\r\n")),
    # Lines ------------------------------------------------------------------------------------------------------------
    Case("lines", "bare LF everywhere", b"GET /v2 HTTP/1.1\nHost: x\nx-api-key: key-gold\n\n"),
    Case("lines", "bare LF after the request line", b"GET /v2 HTTP/1.1\nHost: x\r\n" + KEY + b"\r\n"),
    Case("lines", "bare LF at the end of the head", b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + KEY + b"\n"),
    Case("lines", "bare CR in a value", get(b"/v2", b"A: b\rc")),
    Case("lines", "CR before CRLF", get(b"/v2", b"A: b\r")),
    Case("lines", "a folded line", get(b"/v2", b"A: b", b" c")),
    Case("lines", "a folded line with a tab", get(b"/v2", b"A: b", b"\tc")),
    Case("lines", "a first line that is folded", b"GET /v2 HTTP/1.1\r\n Host: x\r\nHost: x\r\n" + KEY + b"\r\n"),
    Case("lines", "space before a colon", get(b"/v2", b"A : b")),
    Case("lines", "tab before a colon", get(b"/v2", b"A\t: b")),
    Case("lines", "no colon", get(b"/v2", b"A b")),
    Case("lines", "an empty name", get(b"/v2", b": b")),
    Case("lines", "a name with a bracket", get(b"/v2", b"A(b: c")),
    Case("lines", "a name that is not ASCII", get(b"/v2", b"\xc3\xa4: b")),
    Case("lines", "an empty value", get(b"/v2", b"A:")),
    Case("lines", "NUL in a value", get(b"/v2", b"A: b\x00c")),
    Case("lines", "a control character in a value", get(b"/v2", b"A: b\x01c")),
    Case("lines", "DEL in a value", get(b"/v2", b"A: b\x7fc")),
    Case("lines", "bytes above ASCII in a value", get(b"/v2", b"A: \xc3\xa4")),
    Case("lines", "one empty line before", b"\r\n" + get()),
    Case("lines", "three empty lines before", b"\r\n\r\n\r\n" + get()),
    Case("lines", "an LF before", b"\n" + get()),
    Case("lines", "a duplicate field", get(b"/v2", b"A: b", b"A: c")),
    # Request line -----------------------------------------------------------------------------------------------------
    Case("request line", "two spaces before the target", get(b" /v2")),
    Case("request line", "a tab before the target", raw(b"GET\t/v2 HTTP/1.1\r\nHost: x\r\n")),
    Case("request line", "two spaces after the target", get(b"/v2 ")),
    Case("request line", "a space at the end", raw(b"GET /v2 HTTP/1.1 \r\nHost: x\r\n")),
    Case("request line", "a space at the beginning", raw(b" GET /v2 HTTP/1.1\r\nHost: x\r\n")),
    Case("request line", "a space in the target", get(b"/v2?a b")),
    Case("request line", "no version", raw(b"GET /v2\r\nHost: x\r\n")),
    Case("request line", "HTTP/0.9", b"GET /v2\r\n"),
    Case("request line", "HTTP/1.0", get(version=b"HTTP/1.0")),
    Case("request line", "HTTP/1.0 without Host", raw(b"GET /v2 HTTP/1.0\r\n")),
    Case("request line", "HTTP/1.2", get(version=b"HTTP/1.2")),
    Case("request line", "HTTP/2.0", get(version=b"HTTP/2.0")),
    Case("request line", "http/1.1 in small letters", get(version=b"http/1.1")),
    Case("request line", "HTTP/1.1 with a zero before", get(version=b"HTTP/01.1")),
    Case("request line", "HTTP/2's own preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Case("request line", "a method in small letters", get(method=b"get")),
    Case("request line", "an unknown method", get(method=b"FROB")),
    Case("request line", "a method with a bracket", get(method=b"G(T")),
    Case("request line", "an empty method", raw(b" /v2 HTTP/1.1\r\nHost: x\r\n")),
    Case("request line", "TRACE", get(method=b"TRACE")),
    Case("request line", "CONNECT", raw(b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n")),
    # Targets ----------------------------------------------------------------------------------------------------------
    Case("target", "absolute form", get(b"http://x/v2")),
    Case("target", "absolute form of another host", get(b"http://y/v2")),
    Case("target", "absolute form with user information", get(b"http://u:p@x/v2")),
    Case("target", "absolute form with an empty host", get(b"http:///v2")),
    Case("target", "absolute form, query without a path", get(b"http://x?a=/v2")),
    Case("target", "absolute form of another scheme", get(b"ftp://x/v2")),
    Case("target", "OPTIONS *", get(b"*", method=b"OPTIONS")),
    Case("target", "GET *", get(b"*")),
    Case("target", "no slash at the beginning", get(b"v2")),
    Case("target", "a fragment", get(b"/v2#a")),
    Case("target", "NUL", get(b"/v2\x00")),
    Case("target", "bytes above ASCII", get(b"/v2?\xc3\xa4")),
    Case("target", "a double quote", get(b'/v2?"')),
    Case("target", "a backslash", get(b"/v2\\..\\x")),
    Case("target", "percent-encoded letters", get(b"/%76%32")),
    Case("target", "a percent-encoded slash", get(b"/v2%2Fmodels%2Fdigits")),
    Case("target", "a percent-encoded NUL", get(b"/v2%00")),
    Case("target", "a broken percent-encoding", get(b"/v2%zz")),
    Case("target", "an encoded percent sign", get(b"/v2/models/%2564igits")),
    Case("target", "dot segments", get(b"/v2/models/../../v2")),
    Case("target", "encoded dot segments", get(b"/v2/models/%2e%2e/%2e%2e/v2")),
    Case("target", "dot segments past the root", get(b"/../../v2")),
    Case("target", "two slashes", get(b"//v2")),
    Case("target", "longer than 8 KiB", get(b"/v2?" + b"a" * 8300)),
    # Host -------------------------------------------------------------------------------------------------------------
    Case("host", "no Host", raw(b"GET /v2 HTTP/1.1\r\n")),
    Case("host", "two, equal", get(b"/v2", b"Host: x")),
    Case("host", "two, different", get(b"/v2", b"Host: y")),
    Case("host", "empty", raw(b"GET /v2 HTTP/1.1\r\nHost:\r\n")),
    Case("host", "with a port", raw(b"GET /v2 HTTP/1.1\r\nHost: x:80\r\n")),
    Case("host", "an IPv6 address", raw(b"GET /v2 HTTP/1.1\r\nHost: [::1]:80\r\n")),
    Case("host", "with a space", raw(b"GET /v2 HTTP/1.1\r\nHost: a b\r\n")),
    Case("host", "with a slash", raw(b"GET /v2 HTTP/1.1\r\nHost: a/b\r\n")),
    Case("host", "with user information", raw(b"GET /v2 HTTP/1.1\r\nHost: u@x\r\n")),
    Case("host", "a list", raw(b"GET /v2 HTTP/1.1\r\nHost: a, b\r\n")),
    Case("host", "a port that is no number", raw(b"GET /v2 HTTP/1.1\r\nHost: x:y\r\n")),
    # Connections ------------------------------------------------------------------------------------------------------
    Case("connection", "two requests at once", get() + get()),
    Case("connection", "a body, then a request", post(b"Content-Length: 3", body=b"abc") + get()),
    Case("connection", "chunks, then a request", post(CHUNKED, body=ONE) + get()),
    Case("connection", "close, then a request", get(b"/v2", b"Connection: close") + get()),
    Case("connection", "an upgrade to websocket", get(b"/v2", b"Connection: upgrade", b"Upgrade: websocket")),
    Case("connection", "an upgrade to HTTP/2",
         get(b"/v2", b"Connection: upgrade, http2-settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")),
    Case("connection", "Connection names Host", get(b"/v2", b"Connection: host")),
    Case("connection", "Expect: 100-continue", post(b"Expect: 100-continue", b"Content-Length: 3", body=b"abc")),
    Case("connection", "another expectation", post(b"Expect: 200-ok", b"Content-Length: 3", body=b"abc")),
    Case("connection", "130 fields", get(b"/v2", *[b"a%d: b" % n for n in range(130)])),
    Case("connection", "a field of 40 KiB", get(b"/v2", b"A: " + b"b" * 40_000)),
    Case("connection", "two credentials", get(b"/v2", b"authorization: Bearer key-gold")),
)  # fmt: skip

_LF = "A bare LF ends no line here: two parsers that disagree on it disagree on where a message ends."
_TE_CL = "Both at once is how requests are smuggled (RFC 9112, 6.3); h11 lets Transfer-Encoding win."
_CODING = (
    "501 is what RFC 9112, 6.1 would say of a coding that is not known; here whatever is wrong with the framing has "
    "one answer, 400 and the end of the connection."
)
_FOLD = "Folding was given up (RFC 9112, 5.2); h11 joins the lines with a space."
_CONTROL = "A control character has no meaning in a field (RFC 9110, 5.5); the others pass it on."
_SKIPS = "nginx leaves out a line it cannot read and serves the rest; what is left out may be what the next hop reads."
_EXTENSION = (
    "Extensions are dropped, but they have to be text of at most 250 bytes: a size line is no place to hide things."
)
_SPACES = "One space on each side (RFC 9112, 3); nginx takes more, and its neighbours may cut the line elsewhere."
_H11_TARGET = "h11 leaves targets to the application."
_HOST = "A Host is a name or an address, and a port in digits (RFC 9112, 3.2); h11 leaves it to the application."
_PATH = "Nothing is served at such a path: names have no dots, slashes or percent signs in them that could be resolved."

WHY = {
    "framing: Content-Length twice, equal":
        "Two are one too many: the next hop may take the other. h11 takes equal ones.",
    "framing: Content-Length list": "The same; h11 takes a list of equal numbers.",
    "framing: Content-Length of twenty digits": "At most 15 digits; h11 takes 20 and waits for the body.",
    "framing: Content-Length, then chunked": _TE_CL,
    "framing: chunked, then Content-Length": _TE_CL,
    "framing: chunked twice": "Refused by all; to h11 two lines are one unknown coding, and that is 501.",
    "framing: gzip, chunked": _CODING,
    "framing: chunked, identity": _CODING,
    "framing: identity": _CODING,
    "framing: an unknown coding": _CODING,
    "framing: chunked after a vertical tab":
        "A control character, as for h11; nginx takes it as part of a coding it does not know.",
    "framing: chunked in quotes": _CODING,
    "framing: Transfer-Encoding empty": _CODING,
    "framing: chunked in HTTP/1.0": "HTTP/1.0 has no chunks: its proxies pass them on as a body (RFC 9112, 6.1).",
    "framing: Connection names Content-Length":
        "A hop that obeys drops the length and reads the body as the next request.",
    "chunks: space before an extension":
        "Bad white space, which a receiver has to take (RFC 9112, 7.1.1); h11 does not.",
    "chunks: LF in an extension": _LF,
    "chunks: NUL in an extension": _EXTENSION,
    "chunks: an extension of 1000 bytes": _EXTENSION,
    "chunks: a size of nine digits": "At most 8 digits: more cannot be a chunk that is taken.",
    "chunks: a size of seventeen digits": "The same; h11 takes 20 digits and waits for the data.",
    "chunks: LF after a size": _LF,
    "chunks: LF after data": _LF,
    "chunks: a trailer that is no field": "Trailers are dropped, but have to be fields; nginx reads them as anything.",
    "chunks: a trailer with LF": _LF,
    "lines: bare LF everywhere": _LF,
    "lines: bare LF after the request line": _LF,
    "lines: bare LF at the end of the head": _LF,
    "lines: CR before CRLF": "A CR belongs to a CRLF and nowhere else; nginx leaves it out.",
    "lines: a folded line": _FOLD,
    "lines: a folded line with a tab": _FOLD,
    "lines: a name with a bracket": _SKIPS,
    "lines: a name that is not ASCII": _SKIPS,
    "lines: a control character in a value": _CONTROL,
    "lines: DEL in a value": _CONTROL,
    "lines: one empty line before": "To be ignored (RFC 9112, 2.2); h11 does not.",
    "lines: three empty lines before": "Ignored however many come, in one piece or in several; h11 does not.",
    "lines: an LF before": _LF,
    "request line: two spaces before the target": _SPACES,
    "request line: two spaces after the target": _SPACES,
    "request line: a space at the end": _SPACES,
    "request line: no version": "HTTP/0.9 is not spoken; nginx does, and closes.",
    "request line: HTTP/0.9": "HTTP/0.9 is not spoken: what came is the beginning of a head. nginx answers and closes.",
    "request line: HTTP/1.2": "There is no such version; the others take any digit.",
    "request line: HTTP/2.0": "Refused by all but h11, which takes any digits; nginx has a status of its own for it.",
    "request line: HTTP/2's own preface":
        "Oriel takes the connection as HTTP/2 and waits for its settings; h11 reads a request of HTTP/2.0.",
    "request line: a method in small letters":
        "Methods are any token: it is read, and none that is served. nginx takes capitals only.",
    "request line: an unknown method": "It is read, and none that is served; a proxy and a parser pass it on.",
    "request line: TRACE": "It is read, and none that is served; h11 leaves methods to the application.",
    "request line: CONNECT": "No tunnels; h11 leaves methods to the application.",
    "target: absolute form": f"Cut to its path. {_H11_TARGET}",
    "target: absolute form of another host": f"Cut to its path; `X-Forwarded-Host` names its host. {_H11_TARGET}",
    "target: absolute form with user information": _H11_TARGET,
    "target: absolute form with an empty host": _H11_TARGET,
    "target: absolute form, query without a path":
        f"Read as `/?a=/v2` by all that read it: the page at `/`. {_H11_TARGET}",
    "target: absolute form of another scheme": "Only http and https are ours to serve; nginx takes any scheme.",
    "target: OPTIONS *": "Read, and nothing is served there; nginx refuses it. h11 leaves targets to the application.",
    "target: GET *": f"The asterisk goes with OPTIONS (RFC 9112, 3.2.4). {_H11_TARGET}",
    "target: no slash at the beginning": _H11_TARGET,
    "target: a fragment": "Fragments are never sent (RFC 9112, 3.2); nginx cuts them for itself and passes them on.",
    "target: bytes above ASCII": "Targets are ASCII (RFC 9112, 3.2); nginx passes the bytes on.",
    "target: a backslash": f"{_PATH} Windows servers would read a slash.",
    "target: percent-encoded letters":
        "Decoded once, judged, and passed on in the plain spelling: the next hop cannot read another name.",
    "target: a percent-encoded slash":
        "The same: what is authorised is what is passed on; the others pass on what came.",
    "target: a percent-encoded NUL": _PATH,
    "target: a broken percent-encoding": _PATH,
    "target: an encoded percent sign": f"{_PATH} Decoded once only.",
    "target: dot segments": f"{_PATH} nginx resolves them to find a location and passes on what came.",
    "target: encoded dot segments": f"{_PATH} nginx resolves them to find a location and passes on what came.",
    "target: dot segments past the root": f"{_PATH} nginx refuses them as such.",
    "target: two slashes": f"{_PATH} nginx merges slashes to find a location and passes on what came.",
    "target: longer than 8 KiB": "h11 bounds the whole head only.",
    "host: empty":
        "Allowed where a URL has no authority (RFC 9112, 3.2), and nothing here depends on it; nginx refuses it.",
    "host: with a space": _HOST,
    "host: with a slash": _HOST,
    "host: with user information": f"{_HOST} nginx takes it.",
    "host: a list": _HOST,
    "host: a port that is no number": f"{_HOST} nginx takes it.",
    "connection: Connection names Host": "A hop that obeys would drop the Host; the others ignore it.",
    "connection: another expectation":
        "Only `100-continue` exists (RFC 9110, 10.1.1 would allow 417); the others ignore it.",
    "connection: 130 fields": "At most 128 fields; the others bound bytes only.",
    "connection: a field of 40 KiB":
        "At most 32 KiB of head; nginx refuses a field over 8 KiB (with 400), h11 takes as many bytes as it is told.",
    "connection: two credentials": "Whose request would it be? The others know nothing of keys.",
}  # fmt: skip
