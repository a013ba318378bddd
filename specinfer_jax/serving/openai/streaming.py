"""Server-sent events: `data: {...}` for every piece, an error in the midst of them, `data: [DONE]`. Free of jax."""

from collections.abc import AsyncIterator, Callable, Iterator

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from specinfer_jax.serving.openai.call import Call
from specinfer_jax.serving.openai.generation import ClientGone, Piece, Pieces, while_connected
from specinfer_jax.serving.openai.logs import fields_of
from specinfer_jax.serving.openai.responses import ChatCompletionChunk, Completion, Usage

Event = ChatCompletionChunk | Completion
MEDIA_TYPE = "text/event-stream"


class EventStream(Response):
    """The answer to a call whose first piece is there.

    The client's going away ends it at once, in the midst of a wait too; in any case the call ends with it.
    """

    media_type = MEDIA_TYPE

    def __init__(self, call: Call, pieces: Pieces, first: Piece, writer: "EventWriter") -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call, self._pieces, self._first, self._writer = call, pieces, first, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGone as gone:
            fields_of(self._call.http).update(error=gone.code)
        finally:
            await self._pieces.aclose()
            self._call.finish()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self._texts():
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self) -> AsyncIterator[str]:
        try:
            for text in self._writer.texts(self._first):  # `take` has seen it
                yield text
            async for piece in self._pieces:
                for text in self._writer.texts(self._call.take(piece)):
                    yield text
            self._call.check_whole()
            if self._writer.include_usage:
                yield self._writer.usage_text()
        except Exception as error:
            yield self._call.error(error).body()
        yield "[DONE]"


class EventWriter:
    """Events of one call as JSON; an endpoint says what a piece's events and the last one are."""

    def __init__(
        self, call: Call, events: Callable[[Piece], Iterator[Event]], usage_event: Callable[[], Event]
    ) -> None:  # fmt: skip
        options = call.body.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self._is_continuous = self.include_usage and options is not None and bool(options.continuous_usage_stats)
        self._call, self._events, self._usage_event = call, events, usage_event

    def texts(self, piece: Piece) -> Iterator[str]:
        """The events of a piece."""
        for event in self._events(piece):
            event.usage = self._usage() if self._is_continuous else None
            yield event.model_dump_json(exclude=None if self.include_usage else {"usage"})

    def usage_text(self) -> str:
        """The event with the usage."""
        event = self._usage_event()
        event.usage = self._usage()
        return event.model_dump_json()

    def _usage(self) -> Usage:
        return self._call.tally.usage()
