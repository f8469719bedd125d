"""Flights of equal calls that have to queue, and what they hold."""

from .stack import Client
from .test_special_routes import CACHED, FLOWN, INFER, Held, answering, house, until


async def test_a_flight_that_queued_gives_its_bytes_back() -> None:
    """Each kept its body's bytes of the pool's budget for ever, until the pool refused everything."""
    async with house(FLOWN, inflight=1) as it:
        held = it.ups[0].answer = Held()
        async with Client(it.port) as one, Client(it.port) as two, Client(it.port) as three:
            for client, body in ((one, b"x"), (two, b"y" * 1000), (three, b"y" * 1000)):
                client.send(INFER, body)
            await until(lambda: it.members() == 3 and len(it.core.pools["p0"].admission.queue) == 1)
            for _ in range(2):
                held.go.release()
            assert [(await client.reply()).status for client in (one, two, three)] == [200] * 3
        assert len(it.ups[0].seen) == 2 and it.core.pools["p0"].held_bytes == 0
        await until(it.idle)


async def test_an_answer_that_ends_with_its_connection_is_not_kept() -> None:
    """Half of one, of a server that died, looks the same."""
    async with house(CACHED) as it:
        for number in (1, 2):
            it.ups[0].answer = answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhalf of i")
            async with Client(it.port) as client:
                client.send(INFER, b"x")
                await client.reader.readuntil(b"half of i")
            assert len(it.ups[0].seen) == number
        assert not len(it.core.routing.cache)
