"""Header blocks of one HTTP/2 connection: gathered from their frames, decoded or recognised, judged, and given to their
stream's hook. `connection` has the rules.
"""

from mypy_extensions import mypyc_attr

from oriel_wire.errors import BadMessage, HeaderListTooLarge, HpackError
from oriel_wire.h2.block_shapes import MAX_RECENT, BlockShape, learn
from oriel_wire.h2.control import Control
from oriel_wire.h2.fields import check_request, check_response, check_trailers
from oriel_wire.h2.frames import (
    COMPRESSION_ERROR,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    MAX_ID,
    PADDED,
    PRIORITISED,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    RST_STREAM,
    STREAM_CLOSED,
    H2Error,
    frame,
    unpadded,
)
from oriel_wire.h2.known_fields import Field, FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import BODY, ENDED, IS_HEAD, ON_HEADERS, Stream

# Kinds of the next frame that is allowed.
ANY = 0
FIRST = 1  # SETTINGS
MORE = 2  # CONTINUATION
# A flag of our own: an error of the stream only, so its header block has to be decoded all the same.
_SELF_DEPENDENT = 0x100
_LEARN_EVERY = 16  # blocks that were decoded
_SKIPPED = 4  # times the largest block that is decoded is received, to be refused
_NO_TABLE = b"\x20"  # the begin of a block: its sender has no dynamic table any more


@mypyc_attr(allow_interpreted_subclasses=True)
class HeaderBlocks(Control):
    """The receiving of header blocks."""

    __slots__ = (
        "_begun",
        "_block",
        "_block_bytes",
        "_block_flags",
        "_block_id",
        "_block_s",
        "_decoded",
        "_expects",
        "_judged",
        "_max_block",
        "_opened",
        "_recent",
        "_table_gone",
    )

    def __init__(self, *, client: bool, limits: H2Limits, memo: FieldMemo | None) -> None:
        super().__init__(client=client, limits=limits, memo=memo)
        self._max_block = limits.max_block_bytes
        self._expects = FIRST
        self._begun = 0  # requests of this turn
        self._table_gone = False  # the peer has no dynamic table any more: no block has to be decoded for its sake
        self._block: list[bytes] = []
        self._block_id = self._block_flags = self._block_bytes = 0
        self._block_s = 0.0  # when the header block began that is incomplete
        self._opened = 0  # streams that the peer has opened
        self._recent: list[BlockShape] = []  # shapes of the peer's latest blocks
        self._decoded = 0  # blocks of trusted senders
        self._judged: tuple[bytes, list[Field]] | None = None  # a block, in the hook that is called for it

    def _headers(self, flags: int, stream_id: int, block: bytes) -> None:
        if flags & (PADDED | PRIORITISED):
            if flags & PRIORITISED:
                at = 1 if flags & PADDED else 0
                if int.from_bytes(block[at : at + 4], "big") & MAX_ID == stream_id and len(block) >= at + 5:
                    flags |= _SELF_DEPENDENT
            block = bytes(unpadded(flags, block, flags & PRIORITISED != 0))
        self._expects = MORE
        self._block_s = self.now
        self._block_id, self._block_flags, self._block_bytes = stream_id, flags, 0
        self._gather(flags, block)

    def _continuation(self, flags: int, stream_id: int, block: bytes) -> None:
        if self._expects != MORE:
            raise H2Error(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if len(self._block) > self.limits.max_continuations:
            raise H2Error(ENHANCE_YOUR_CALM, "a header block is in too many frames")
        self._gather(flags, block)

    def _gather(self, flags: int, piece: bytes) -> None:
        """Take one more frame of a header block.

        Too large a block concerns its stream only, and is not kept, if no dynamic table depends on it.
        """
        self._block.append(piece)
        self._block_bytes += len(piece)
        too_large = self._block_bytes > self._max_block
        if too_large:
            if self._block[0][:1] == _NO_TABLE:
                self.decoder.decode(_NO_TABLE)
            if not self.decoder.stateless or self._block_bytes > self._max_block * _SKIPPED:
                raise H2Error(ENHANCE_YOUR_CALM, "a header block is too large")
            self._block = [b""] * len(self._block)
        if flags & END_HEADERS:
            block = None if too_large else b"".join(self._block)
            self._block = []
            self._expects = ANY
            self._decode(self._block_flags, self._block_id, block)

    def _decode(self, flags: int, stream_id: int, block: bytes | None) -> None:
        """Handle a whole header block; None: one that is too large to be decoded."""
        stream = self.streams.get(stream_id)
        swallow = stream is None and self._swallows(stream_id)
        if swallow and self._table_gone:
            self._charge(1)
            return
        fields: list[Field] | None = None
        if (
            block is not None
            and self._recent
            and self.decoder.stateless
            and not swallow
            and not flags & _SELF_DEPENDENT
        ):
            for shape in self._recent:
                values = shape.read(block, self.limits.max_header_list_bytes)
                if values is not None:
                    self.decoder.fresh = []
                    if stream is None:
                        self._request(stream_id, fields, flags & END_STREAM != 0, shape, values)
                    else:
                        self._more_headers(stream, shape.fields_of(values), flags & END_STREAM != 0, shape)
                    return
        try:
            fields = self.decoder.decode(b"" if block is None else block)
        except HeaderListTooLarge:
            pass
        except HpackError as error:
            raise H2Error(COMPRESSION_ERROR, error.message) from None
        self._table_gone = self.settings_acknowledged
        if block is None:
            fields = None
        elif fields is not None:
            self._judged = (block, fields)
        if swallow:
            self._charge(1)
        elif self.decoder.malformed or flags & _SELF_DEPENDENT:
            message = self.decoder.malformed or "a stream depends on itself"
            self._stream_error(stream_id, stream, PROTOCOL_ERROR, message)
        elif stream is None:
            self._request(stream_id, fields, flags & END_STREAM != 0)
        else:
            self._more_headers(stream, fields, flags & END_STREAM != 0)
        self._judged = None

    def trust_fields(self) -> BlockShape | None:
        """Let the memo know the fields of the block for which a hook is called: its sender is authenticated.

        Returns its shape, if blocks like it will be recognised and this one was not.
        """
        judged, self._judged = self._judged, None
        if judged is None:
            return None
        block, fields = judged
        memo, fresh = self.decoder.memo, self.decoder.fresh
        shape: BlockShape | None = None
        self._decoded += 1
        # A peer whose blocks have no shapes, or too many, does not cost an attempt each time.
        if self.decoder.stateless and (self._decoded < _LEARN_EVERY or not self._decoded % _LEARN_EVERY):
            shape = learn(memo, block, fields)
            if shape is not None and shape not in self._recent:
                self._recent = [shape, *self._recent[: MAX_RECENT - 1]]
        if fresh:
            memo.keep(fresh)
        return shape

    def _swallows(self, stream_id: int) -> bool:
        """Note a new stream of a client; or whether HEADERS on a stream that is gone are swallowed. Raises H2Error."""
        if self._idle(stream_id):
            if self.client or not stream_id & 1:
                raise H2Error(PROTOCOL_ERROR, "HEADERS on an idle stream, or on one of the server")
            self.last_id = stream_id
            self._opened += 1
            return stream_id > self._accepts_up_to
        if self._was_reset(stream_id) or (not self.client and stream_id > self._accepts_up_to):
            return True
        if not self.client and self._opened != (self.last_id + 1) >> 1:  # some number was left out
            raise H2Error(PROTOCOL_ERROR, "the number of a new stream is not above the others")
        raise H2Error(STREAM_CLOSED, "HEADERS on a closed stream")

    def _request(
        self,
        stream_id: int,
        fields: list[Field] | None,
        end: bool,
        shape: BlockShape | None = None,
        values: list[bytes] | None = None,
    ) -> None:
        """Open a stream for a client's request, whose fields were decoded or recognised by their shape."""
        if self._reset_ahead and stream_id in self._reset_ahead:
            self._charge(1)
            self._remember_reset(stream_id)
            return
        if len(self.streams) >= self.limits.max_streams:
            if self.settings_acknowledged:
                self._charge_reset()
            else:
                self._charge(1)  # it does not know the limit yet
            self._remember_reset(stream_id)
            self._reply(frame(RST_STREAM, 0, stream_id, REFUSED_STREAM.to_bytes(4, "big")))
            return
        length = -1
        if fields is not None:
            try:
                length = check_request(fields)
                if end and length > 0:
                    raise BadMessage("DATA differs from content-length")
            except BadMessage as error:
                self._stream_error(stream_id, None, PROTOCOL_ERROR, error.message)
                return
        self._begun += 1
        stream = self.new_stream(stream_id)
        stream.id = stream_id
        stream.opened_s = self.now
        stream.send_window = self.peer_window
        stream.expected = length
        stream.receiving = ENDED if end else BODY
        self._begin(stream)
        if shape is not None and values is not None:
            self.on_recognised(stream, shape, values, end)
        elif fields is None:
            self.on_too_large(stream, end)
        else:
            self.on_headers(stream, fields, end)

    def _begin(self, stream: Stream) -> None:
        stream.window = self._stream_window
        stream.window_size = self.limits.stream_window_bytes
        self.streams[stream.id] = stream

    def _more_headers(
        self, stream: Stream, fields: list[Field] | None, end: bool, shape: BlockShape | None = None
    ) -> None:
        """HEADERS on an open stream: an answer, interim or final, or trailers."""
        meaning = ON_HEADERS[stream.receiving]
        try:
            if meaning >= 0:
                self._stream_error(stream.id, stream, meaning, "HEADERS after the end")
                return
            if fields is None:
                self._stream_error(stream.id, stream, ENHANCE_YOUR_CALM, "the header list is too large")
                return
            if meaning == IS_HEAD:
                self._answer(stream, fields, end, shape)
                return
            if shape is None or shape.is_head:
                check_trailers(fields)
            if not end:
                raise BadMessage("trailers do not end their stream")
            if stream.expected > 0:
                raise BadMessage("DATA differs from content-length")
        except BadMessage as error:
            self._stream_error(stream.id, stream, PROTOCOL_ERROR, error.message)
            return
        self._received_end(stream)
        self.on_trailers(stream, fields)

    def _answer(self, stream: Stream, fields: list[Field], end: bool, shape: BlockShape | None) -> None:
        """The head of an answer. Raises BadMessage."""
        length = -1 if shape is not None and shape.is_head else check_response(fields)
        status = fields[0][1]
        if status[0] == 0x31:
            if end:
                raise BadMessage("an interim answer ends its stream")
            self._charge(1)
            return
        if stream.head_only or status == b"204" or status == b"304":
            length = 0
        if end:
            if length > 0:
                raise BadMessage("DATA differs from content-length")
            self._received_end(stream)
        else:
            stream.expected = length
            stream.receiving = BODY
        self.on_headers(stream, fields, end)

    def _received_end(self, stream: Stream) -> None:
        stream.receiving = ENDED
        if stream.sending == ENDED:
            self._finish(stream)
