from oriel_logic.endpoints import DOWN_S, Endpoint, Endpoints


class Nobody:
    async def request(self, *args: object, **keywords: object) -> object:
        raise NotImplementedError

    async def close(self) -> None: ...


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def several(count: int, clock: Clock) -> tuple[Endpoints, list[Endpoint]]:
    each = [Endpoint(f"e{index}", Nobody()) for index in range(count)]  # type: ignore[arg-type]
    return Endpoints(each, clock=clock), each


def test_equals_take_turns() -> None:
    endpoints, each = several(3, Clock())
    picked = [endpoints.pick() for _ in range(6)]
    assert all(picked.count(one) == 2 for one in each)


def test_the_least_loaded_is_picked() -> None:
    endpoints, each = several(3, Clock())
    each[0].outstanding = each[2].outstanding = 1
    assert [endpoints.pick() for _ in range(3)] == [each[1]] * 3


def test_one_that_was_down_is_passed_over_for_a_while() -> None:
    clock = Clock()
    endpoints, each = several(2, clock)
    endpoints.mark_down(each[0])
    assert {endpoints.pick() for _ in range(4)} == {each[1]}
    assert endpoints.pick([each[1]]) is each[0]
    clock.now += DOWN_S
    assert {endpoints.pick() for _ in range(4)} == set(each)


def test_none_is_left_when_all_were_tried() -> None:
    endpoints, each = several(2, Clock())
    assert endpoints.pick(each) is None
    assert several(0, Clock())[0].pick() is None
