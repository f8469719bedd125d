"""`Deadline` does what `asyncio.timeout` does."""

import asyncio

import pytest

from oriel_logic.server.pipeline import Deadline


async def test_in_time_nothing_happens() -> None:
    with Deadline(30) as limit:
        await asyncio.sleep(0)
    assert not limit.is_past


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.001])
async def test_when_the_time_is_over_the_body_is_cancelled_where_it_waits(seconds: float) -> None:
    seen = []
    with pytest.raises(TimeoutError):
        with Deadline(seconds) as limit:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise
    assert limit.is_past and seen == ["cancelled"]
    await asyncio.sleep(0)  # the task itself is not cancelled


@pytest.mark.parametrize("seconds", [30.0, 0.0], ids=["alone", "both-at-once"])
async def test_a_cancellation_by_somebody_else_passes_through(seconds: float) -> None:
    async def work() -> None:
        with Deadline(seconds):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_body_stays_what_it_is_also_when_the_time_is_over() -> None:
    with pytest.raises(ValueError, match="its own"):
        with Deadline(0):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("its own") from None
    await asyncio.sleep(0)


async def test_the_inner_of_two_does_not_end_the_outer() -> None:
    with Deadline(30) as outer:
        with pytest.raises(TimeoutError):
            with Deadline(0):
                await asyncio.Event().wait()
        await asyncio.sleep(0)
    assert not outer.is_past
