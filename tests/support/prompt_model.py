"""A table of prompts in slow and obvious words: one list of prompts that is looked through for everything."""

from dataclasses import dataclass, field

LEASE, ATTEMPTS, KEEP, LAG = 10.0, 2, 1, 2


@dataclass
class ModelPrompt:
    """One prompt; `answers` are (version, reward or None) by place, `failed` places that have none."""

    key: tuple
    order: int
    priority: float
    is_evaluation: bool
    state: str = "waiting"
    reason: str = ""
    step: int = -1
    place: int = -1
    attempts: int = 0
    lease: int = 0
    worker: bytes = b""
    until: float = float("inf")
    answers: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    given_up: set = field(default_factory=set)
    has_columns: bool = True


class ModelTable:
    """What `PromptTable` has to do."""

    def __init__(self, group, at_least, on_stale):
        self.group, self.at_least, self.on_stale = group, at_least, on_stale
        self.prompts, self.forgotten = {}, {}
        self.next_order, self.front = 0, 0
        self.session, self.former, self.committed, self.newest = "", [], -1, 0
        self.finished = set()

    def order(self):
        self.next_order += 1
        return self.next_order

    def of(self, *states):
        return [each for each in self.prompts.values() if each.state in states]

    def in_order(self, state):
        return sorted(self.of(state), key=lambda each: (-each.priority, each.order))

    def add(self, key, priority, is_evaluation):
        if key in self.prompts or key[:2] in self.forgotten:
            return False
        self.prompts[key] = ModelPrompt(key, self.order(), priority, is_evaluation)
        return True

    def lease(self, worker, now, number, having=()):
        forgotten = [each for each in self.of("leased") if each.worker == worker and each.lease not in having]
        if forgotten:
            each = min(forgotten, key=lambda each: each.lease)
            each.until = now + LEASE
            return each
        found = self.in_order("waiting")
        if found:
            each = found[0]
            each.state, each.worker, each.lease, each.until = "leased", worker, number, now + LEASE
            each.attempts, each.given_up = each.attempts + 1, set()
            return each
        return None

    def end(self, each):
        each.lease, each.worker, each.until, each.given_up = 0, b"", float("inf"), set()

    def missing(self, each):
        return [i for i in range(self.group) if i not in each.answers and i not in each.failed]

    def answer(self, each, index, version, reward):
        if each.state in ("waiting", "leased") and index in self.missing(each):
            each.answers[index] = [version, reward]
            self.settle(each)
            return True
        return False

    def amend(self, each, index, reward):
        if each.state in ("waiting", "leased", "answered") and index in each.answers:
            each.answers[index][1] = reward
            self.settle(each)

    def fail(self, each, lease, index, is_again):
        if (
            each.state not in ("waiting", "leased")
            or index not in self.missing(each)
            or (is_again and lease != each.lease)
        ):
            return
        if is_again:
            each.given_up.add(index)
        else:
            each.failed[index] = "failed"
        self.settle(each)

    def settle(self, each):
        if missing := self.missing(each):
            if each.lease and set(missing) <= each.given_up:
                self.give_back(each)
            return
        self.end(each)
        if any(reward is None for _, reward in each.answers.values()):
            each.state = "answered"
        elif len(each.answers) < self.at_least:
            reasons = [each.failed[i] for i in sorted(each.failed)]
            self.drop(each, "attempts" if reasons[0] == "attempts" else "failed")
        else:
            each.order, each.state = self.order(), "ready"

    def give_back(self, each):
        self.end(each)
        each.state = "waiting"
        if each.attempts >= ATTEMPTS:
            each.failed.update(dict.fromkeys(self.missing(each), "attempts"))
            self.settle(each)

    def drop(self, each, reason):
        self.end(each)
        each.state, each.reason, each.has_columns = "dropped", reason, False

    def expire(self, now):
        for each in sorted(self.of("leased"), key=lambda each: (each.until, each.lease)):
            if each.until <= now:
                self.give_back(each)

    def version(self, each):
        return min((version for version, _ in each.answers.values()), default=0)

    def reset(self, each):
        each.answers, each.failed, each.attempts, each.has_columns, each.given_up = {}, {}, 0, True, set()

    def is_stale(self, each):
        return self.newest > 0 and self.version(each) < self.newest - LAG

    def draw(self, step, count):
        """Places of the step's prompts; None while there are too few."""
        fixed = sorted((each for each in self.prompts.values() if each.step == step), key=lambda each: each.place)
        if fixed:
            return [each.key for each in fixed]
        ready = [each for each in self.in_order("ready") if not each.is_evaluation]
        taken, passed = [], []
        for each in ready:
            if len(ready) < count:
                passed += [each] if self.is_stale(each) else []
            elif len(taken) < count:
                (passed if self.is_stale(each) else taken).append(each)
        for each in passed:
            if self.on_stale == "wait":
                self.front -= 1
                self.reset(each)
                each.order, each.state = self.front, "waiting"
            else:
                self.drop(each, "stale")
        if len(taken) < count:
            return None
        for place, each in enumerate(taken):
            each.state, each.step, each.place = "drawn", step, place
        return [each.key for each in taken]

    def commit(self, step):
        if step > self.committed:
            for each in self.of("drawn"):
                if each.step <= step:
                    each.state = "committed"
            self.committed = step
            self.let_go()

    def let_go(self):
        for each in self.of("committed"):
            if each.step <= self.committed - KEEP:
                each.has_columns = False

    def rewind(self, step, session):
        if session == self.session:
            return
        self.former.append(self.session)
        self.session, self.committed = session, step
        back = sorted(
            (each for each in self.prompts.values() if each.step > step), key=lambda each: (each.step, each.place)
        )
        for each in self.of("drawn"):
            if each.step <= step:
                each.state = "committed"
        self.front -= len(back)
        for place, each in enumerate(back):
            each.order, each.step, each.place = self.front + place, -1, -1
            if each.has_columns:
                each.state = "ready"
            else:
                self.reset(each)
                each.state = "waiting"
        self.let_go()

    def forget(self, dataset, epoch):
        rows = [each for each in self.prompts.values() if each.key[:2] == (dataset, epoch)]
        if any(each.state not in ("committed", "dropped") and not each.is_evaluation for each in rows):
            return None
        for each in rows:
            del self.prompts[each.key]
        if rows:
            self.forgotten[dataset, epoch] = self.forgotten.get((dataset, epoch), 0) + len(rows)
        return len(rows)
