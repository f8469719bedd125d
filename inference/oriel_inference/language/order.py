"""The order of one language model: which generations are in its next step, which pause, and which go on. Pure.

Theory. The engine has a number of slots; a turn is a slice of SLICE tokens in one of them. A generation whose slice is
over goes back to the queue while anything waits there, and `SlaQueue` decides whose turn is next: band, tenant by
tokens, then what is due first. Mostly that is the same generation again, which then goes on in the engine without
noticing. So all rules of the queue hold for tokens: a band that is passed over gets its floor in turns, and tenants
share a band by tokens.

Rules.
1. A more urgent newcomer does not wait for the end of a slice: the least urgent generation pauses at once if there is
   no slot, no room in the cache, or too much of a prompt before it.
2. Among the generations of one tenant and band, those that have begun go first, in turns. The others go in the order in
   which they have to begin to be in time. So a tenant never has more than all slots in progress.
3. Less urgent ones pause while a step would take longer than a more urgent one wants for a token, or needs to have its
   whole answer in time. Their prompts wait until it is far enough ahead of its wanted times.
4. A turn by the floor is shielded: nothing interrupts it, unless it begins with a long prompt. It counts only while
   none of its band takes turns in a slot, so that it never takes one from its own kind.
5. Never paused once they have begun: what ends sooner than a resume costs, and what a resume would change
   (`Generation.is_bound`). Less urgent bands than the first have at most one of BOUND_SHARE slots for such generations;
   others wait aside.

Silence. A paused stream with P paused ones of its tenant before it waits for at most P + 1 turns of its tenant. Its
band gets `floor_share` of all turns, and N generations that run end N turns in SLICE steps: for one tenant these are
(P + 1) x SLICE / (floor_share x N) steps. That N is less than `slots` by those that never pause, and by rule 3.

Owner and single writer: the scheduler.
"""

from collections import Counter

from oriel_inference.language.generation import Generation
from oriel_inference.language.step_times import StepTimes
from oriel_policies.waiting.feasibility import PROBE
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue

SLICE = 32
RESUME_STEPS = 2  # the cost of a resume; a learned one would stay at a bad value once it lets nothing pause
BOUND_SHARE = 4
PROMPT_STEPS = 4  # the most steps of prompt tokens that the engine has, unless a single prompt is longer
_BOUND = "bound"
_BEGUN_S = 1e8  # the rank of those that have begun, before all others of their tenant


class StepOrder:
    """The generations of one model, waiting and running. paused: those among the waiting ones that have begun.

    slots: sequences that the engine takes at once.
    cache_tokens: tokens that its cache holds.
    step_tokens: prompt tokens of one step.
    max_items, max_bytes: bounds of the calls that wait and have not begun, and of their bytes.
    """

    def __init__(self, *, slots: int, cache_tokens: int, step_tokens: int, max_items: int, max_bytes: int) -> None:
        self.waiting = SlaQueue(max_items=max_items, max_bytes=max_bytes)
        self.running: dict[Generation, None] = {}
        self.paused: dict[Generation, None] = {}
        self.times = StepTimes()
        self.slots = slots
        self._cache_tokens = cache_tokens
        self._prompt_tokens = PROMPT_STEPS * step_tokens
        self._waiting_us: Counter[tuple[int, str]] = Counter()  # of the engine, by band and tenant
        self._most: dict[Generation, int] = {}  # how many may run at once for the sake of this one
        self._refused = 0

    def join(self, generation: Generation, now: float) -> list[Generation] | None:
        """Queue a new generation. Returns those that it displaced; None if the queue is full."""
        displaced = self._push(generation, now, admitted=generation.call.admitted)
        return None if displaced is None else [self._unwrap(ticket) for ticket in displaced]

    def remove(self, generation: Generation) -> None:
        """Remove a generation that has ended, if it is still here."""
        self.paused.pop(generation, None)
        if generation.ticket is not None:
            self.waiting.remove(generation.ticket)
            self._unwrap(generation.ticket)
        elif generation in self.running:
            self._release(generation)
        if generation.is_bound and _BOUND in self.waiting.aside:
            self.waiting.bring_back(_BOUND)

    def expired(self, now: float) -> list[Generation]:
        """Remove and return what waited until its deadline, and return what runs beyond its own."""
        waited = [self._unwrap(ticket) for ticket in self.waiting.expire(now)]
        return waited + [each for each in self.running if each.deadline <= now]

    def next_expiry(self) -> float | None:
        """Return when `expired` has to be called next; None if nothing is there."""
        waiting = self.waiting.next_deadline()
        found = [each.deadline for each in self.running] + ([] if waiting is None else [waiting])
        return min(found, default=None)

    def progressed(self, generation: Generation, tokens: int, now: float) -> None:
        """Count new tokens of a generation."""
        generation.used += tokens
        generation.cost += tokens
        if not generation.first_s:
            generation.first_s = now
            generation.cost += generation.prompt_tokens
            if generation.ticket is not None:  # it paused during the step that made it, and has another deadline now
                self.waiting.remove(generation.ticket)
                self._push(self._unwrap(generation.ticket), now, admitted=True)
                self._paused(generation, now)

    # Choosing ---------------------------------------------------------------------------------------------------

    def choose(self, now: float) -> tuple[list[Generation], list[Generation]]:
        """Decide about the next step; return the generations that pause and those that get a slot."""
        before = dict(self.running)
        self._most = {each: self._most_with(each, now) for each in before}
        for each in before if len(self.waiting) else ():
            if each.used >= SLICE:
                each.is_shielded = False
                self._put_back(each, now)
        held = sum([each.tokens + 1 for each in self.running])
        for each in sorted(self.running, key=_urgency, reverse=True):
            too_many = len(self.running) > self._most_beside(each.band)
            if (too_many or held > self._cache_tokens) and self._put_back(each, now):
                held -= each.tokens + 1
        self._fill(now)
        # The head of the queue cannot use the other slots now: those that have just given them up, or are paused, can.
        for each in sorted({**before, **self.paused}, key=_urgency) if len(self.waiting) else ():
            if each.ticket is not None and self._fits(each, now):
                self._keep(each, each.ticket)
        paused = [each for each in before if each not in self.running]
        added = [each for each in self.running if each not in before]
        for each in paused:
            if each.has_begun:
                self._paused(each, now)
        for each in added:
            each.resumed(now)
            self.paused.pop(each, None)
        return paused, added

    def _fill(self, now: float) -> None:
        """Give slots in the order of the queue, as long as its head has one or can make one free."""
        while (ticket := self.waiting.peek(now)) is not None:
            head: Generation = ticket.payload
            by_floor = self.waiting.rows_ahead(head.band - 1) > 0
            bound = [each for each in self.running if each.is_bound and each.band]
            if by_floor and any(each.band == head.band and not each.is_bound for each in self.running):
                self._take(head, now)  # the turn is void
                self._release(head)
                self._push(head, now, admitted=ticket.admitted)
            elif head.is_bound and head.band and len(bound) >= max(1, self.slots // BOUND_SHARE):
                self.waiting.set_aside(now)
            elif self._fits(head, now, by_floor=by_floor):
                self._take(head, now)
                head.is_shielded = by_floor and (head.has_begun or head.prompt_tokens <= self._prompt_tokens)
                self._most[head] = self._most_with(head, now)
            elif not any(
                each.band > head.band and self._put_back(each, now)
                for each in sorted(self.running, key=_urgency, reverse=True)
            ):
                return

    def _fits(self, head: Generation, now: float, *, by_floor: bool = False) -> bool:
        """Return whether a generation can have a slot beside those that run."""
        if not self.running:
            return True
        if len(self.running) >= (self.slots if by_floor else self._most_beside(head.band)):
            return False
        if sum([each.tokens + self._left(each) // 2 for each in (*self.running, head)]) > self._cache_tokens:
            return False
        if head.has_begun:
            return True
        prompts = [each for each in self.running if not each.has_begun]
        pending = sum([each.prompt_tokens for each in prompts])
        if pending and pending + head.prompt_tokens > self._prompt_tokens:
            return False
        if by_floor:
            return True
        # The engine computes prompts in the order in which they came: it has those of one band at a time.
        if any(each.band < head.band or (each.band > head.band and self._may_pause(each)) for each in prompts):
            return False
        takes_s = head.prompt_tokens * self.times.prompt_s
        return all(
            len(each.ids) * each.token_s - (now - each.first_s) >= takes_s
            for each in self.running
            if each.band < head.band and each.token_s and each.first_s
        )

    def _may_pause(self, each: Generation) -> bool:
        stays = each.has_begun and (each.is_bound or each.most - len(each.ids) <= RESUME_STEPS)
        return not (each.is_shielded or stays)

    def _most_beside(self, band: int) -> int:
        """Return how many generations may run together if one of `band` is the least urgent of them."""
        wanted = [self._most[each] for each in self.running if each.band < band and each in self._most]
        return min(wanted, default=self.slots)

    def _most_with(self, each: Generation, now: float) -> int:
        """Return how many may run so that this one has its tokens in time; all, if even alone it would not."""
        token_s = each.token_s if each.is_stream else (each.deadline - now) / self._left(each)
        return (self.times.sequences_within(token_s, self.slots) if token_s > 0.0 else 0) or self.slots

    # Slots and tickets ------------------------------------------------------------------------------------------

    def _take(self, head: Generation, now: float) -> None:
        """Give the head of the queue a slot."""
        ticket = self.waiting.pop(now)
        assert ticket is not None
        head.turn, head.used, head.cost = ticket, 0, 0
        self.running[self._unwrap(ticket)] = None

    def _paused(self, each: Generation, now: float) -> None:
        each.paused_at, self.paused[each] = now, None
        each.pauses += 1

    def _keep(self, each: Generation, ticket: Ticket) -> None:
        """Return a slot to one that waits for its next turn. Nobody was charged for that: its tokens come on top."""
        self.waiting.remove(ticket)
        each.turn, each.cost = ticket, int(ticket.cost)
        self.running[self._unwrap(ticket)] = None

    def _release(self, each: Generation) -> None:
        """Take a generation out of its slot, and charge its tenant what it had there."""
        del self.running[each]
        if each.turn is not None:
            self.waiting.settle(each.turn, each.cost)
            each.turn = None

    def _put_back(self, each: Generation, now: float) -> bool:
        """Return a running generation to the queue, if it may pause."""
        if may_pause := self._may_pause(each):
            each.cost = each.cost if each.has_begun else SLICE
            self._release(each)
            self._push(each, now, admitted=True)
        return may_pause

    def _unwrap(self, ticket: Ticket) -> Generation:
        """Return the generation of a ticket that has left the queue."""
        generation: Generation = ticket.payload
        ticket.payload = generation.ticket = None
        key = ticket.band, ticket.tenant
        self._waiting_us[key] -= ticket.rows
        if not self._waiting_us[key]:
            del self._waiting_us[key]
        return generation

    def _push(self, each: Generation, now: float, *, admitted: bool) -> list[Ticket] | None:
        prompt, left = 0 if each.has_begun else each.prompt_tokens, self._left(each)
        prompt_s, step_s = self.times.reading_s(prompt), self.times.step_s(self.slots)
        ticket = Ticket(
            band=each.band,
            tenant=each.tenant,
            deadline=each.deadline,
            cost=SLICE + prompt,
            size_bytes=0 if admitted else each.call.ticket.size_bytes,
            rows=max(1, int((prompt_s + left * step_s / self.slots) * 1e6)),  # microseconds of the engine
            payload=each,
        )
        due_s = each.deadline - prompt_s - (0.0 if each.is_stream else left * step_s)
        if each.has_begun:
            due_s = (each.paused_at or now) - _BEGUN_S
        ticket.order, ticket.admitted = due_s, admitted
        ticket.model = _BOUND if each.is_bound and each.band else ""
        displaced = self.waiting.push(ticket)
        if displaced is not None:
            each.ticket = ticket
            self._waiting_us[ticket.band, ticket.tenant] += ticket.rows
        return displaced

    # Predictions ------------------------------------------------------------------------------------------------

    def _left(self, each: Generation) -> int:
        """Return the expected number of tokens until its end."""
        usual = max(int(self.times.answer), each.least - len(each.ids))
        return max(1, min(each.most - len(each.ids), usual or each.most))

    def _staying(self, band: int) -> list[Generation]:
        """Return those that would not pause for a generation of `band`."""
        return [each for each in self.running if each.band <= band or not self._may_pause(each)]

    def wait_s(self, band: int, tenant: str | None = None) -> float:
        """Return how long a new generation of `band` would wait for a slot; 0.0 also while nothing is known.

        tenant: whose it is, if that is known: the other tenants of its band get their turns in turn with its own.
        """
        staying, slice_s = self._staying(band), SLICE * self.times.step_s(self.slots)
        if tenant is None:
            ahead_us = float(self.waiting.rows_ahead(band))
        else:
            own_us = self._waiting_us[band, tenant]
            theirs = [us for (of, name), us in self._waiting_us.items() if of == band and name != tenant]
            turn_us = own_us + slice_s / self.slots * 1e6
            ahead_us = self.waiting.rows_ahead(band - 1) + own_us + sum([min(us, turn_us) for us in theirs])
        if len(staying) < self._most_beside(band):
            return ahead_us / 1e6
        ends_s = min([self._left(each) for each in staying]) * self.times.step_s(len(staying))
        others = [each for each in staying if each.band == band and tenant not in (None, each.tenant)]
        takes_turns = any(self._may_pause(each) for each in others)
        return ahead_us / 1e6 + (min(ends_s, slice_s) if takes_turns else ends_s)

    def too_late_s(self, new: Generation, now: float) -> float | None:
        """Return None if a new generation may be in time, else the seconds after which one like it would be; 0.0 if it
        would never be. One in PROBE that will probably be late may be in time: it shows whether that is still true.
        """
        times, left_s = self.times, new.deadline - now
        if not times.known:
            return None
        tokens = 1 if new.is_stream else max(new.least, min(new.most, int(times.quick.value)))
        prompt_s, together = times.reading_s(new.prompt_tokens), min(self.slots, len(self._staying(new.band)) + 1)
        late_s = self.wait_s(new.band, new.tenant) + prompt_s + tokens * times.step_s(together) - left_s
        if late_s <= 0.0:
            return None
        self._refused += 1
        if self._refused % PROBE == 0:
            return None
        return late_s if prompt_s + tokens * times.step_s(1) <= left_s else 0.0


def _urgency(each: Generation) -> tuple[int, bool, float]:
    """Return the key by which generations pause: the largest first."""
    return each.band, not each.has_begun, each.call.arrived_s
