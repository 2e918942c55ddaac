"""The fill session: matching, clamping, history, counts (spec 50 sections 3, 6, 10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from mlxlite.text.fill.plan import (
    PATIENCE,
    EchoConfig,
    FillPlan,
    Kind,
    Origin,
    Policy,
    Proposal,
    Row,
    StrictPlan,
    View,
)
from mlxlite.text.fill.session import Counters, Session

EOS = 99
QUOTE = 34


def row(trigger: Sequence[int], emit: Sequence[int], kind: Kind = Kind.SCAFFOLD) -> Row:
    return Row(tuple(trigger), tuple(emit), kind, requires_context=False)


def session(*rows: Row, prompt: Sequence[int] = (), max_span: int = 32, **more: object) -> Session:
    strict = StrictPlan(rows, frozenset({QUOTE}))
    return Session(FillPlan(strict, None, frozenset({EOS}), max_span), prompt, **more)  # type: ignore[arg-type]  # of a helper


def offered(made: Session, *tokens: int, budget: float = math.inf) -> tuple[int, ...] | None:
    """What the last of some tokens brings; the ones before must bring nothing."""
    *before, last = tokens
    for token in before:
        assert made.push(token) is None
    proposal = made.push(last, budget)
    return None if proposal is None else proposal.ids


# ---------------------------------------------------------------------------------- matching


def test_the_whole_trigger_must_be_the_end_of_the_history() -> None:
    rows = row([1, 2, 3], [4, 5])
    assert offered(session(rows), 1, 2, 3) == (4, 5)
    assert offered(session(rows), 1, 9, 3) is None
    assert offered(session(rows), 2, 3) is None, "too short"
    assert offered(session(row([1, 2, 3], [4, 5]), prompt=[7, 1, 2]), 3) == (4, 5)


def test_the_longest_trigger_wins_and_the_plan_breaks_ties() -> None:
    rows = (row([3], [10, 11]), row([2, 3], [12, 13]), row([2, 3], [14, 15]))
    assert offered(session(*rows), 1, 2, 3) == (12, 13)
    assert offered(session(*rows), 1, 9, 3) == (10, 11)


def test_rows_without_a_trigger_or_an_end_are_ignored() -> None:
    made = session(row([], [1, 2]), row([3], []))
    assert offered(made, 3, 3) is None


def test_strict_rows_are_sure_and_tell_their_origin() -> None:
    for kind, origin in (
        (Kind.NAME, Origin.SCHEMA),
        (Kind.KEY, Origin.SCHEMA),
        (Kind.SCAFFOLD, Origin.TEMPLATE),
        (Kind.CLOSE, Origin.TEMPLATE),
        (Kind.TURN_END, Origin.TEMPLATE),
    ):
        assert session(row([1], [2, 3], kind)).push(1) == Proposal((2, 3), Policy.ASSERT, origin)


class Guard:
    """Says what it is told to, and keeps what it saw."""

    is_lost = False

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.seen: list[int] = []
        self.asked: list[Row] = []

    def observe(self, ids: Sequence[int]) -> None:
        self.seen += ids

    def allows(self, row: Row) -> bool:
        self.asked.append(row)
        return self.answer


def test_a_row_that_needs_its_context_needs_a_guard() -> None:
    needy = Row((1, 2), (3, 4), Kind.NAME)
    assert offered(session(needy), 1, 2) is None
    for answer in (True, False):
        guard = Guard(answer)
        made = session(needy, prompt=[7, 8], guard=guard)
        assert offered(made, 5, 1, 2) == ((3, 4) if answer else None)
        assert guard.asked == [needy], "asked only where the whole trigger stands"
        assert guard.seen == [5, 1, 2], "not the prompt"


def test_a_row_that_may_be_checked_waits_as_long_as_its_guard() -> None:
    row = Row((1, 2), (3, 4), Kind.NAME, may_check=True)
    prose = [5] * (PATIENCE + 1)
    for guard, expected in ((None, None), (Guard(True), (3, 4)), (Guard(False), (3, 4))):
        assert offered(session(row, guard=guard), *prose, 1, 2) == expected
    lost = Guard(False)
    lost.is_lost = True
    made = session(row, guard=lost)
    assert offered(made, 1, 2) == (3, 4), "to be checked"
    assert offered(session(row, guard=lost), *prose, 1, 2) is None


def test_a_row_that_the_guard_refuses_leaves_the_next_one_its_turn() -> None:
    made = session(Row((1, 2), (3, 4), Kind.NAME), row([2], [5, 6]), guard=Guard(False))
    assert offered(made, 1, 2) == (5, 6)


# ----------------------------------------------------------------------------------- history


def test_rows_chain_after_a_commit_and_not_before() -> None:
    made = session(row([1], [2, 3, 4]), row([2, 3, 4, 5], [6, 7]))
    proposal = made.push(1)
    assert proposal is not None
    made.commit(proposal, 3)
    assert offered(made, 5) == (6, 7)

    declined = session(row([1], [2, 3, 4]), row([2, 3, 4, 5], [6, 7]))
    proposal = declined.push(1)
    assert proposal is not None
    declined.commit(proposal, 0)
    assert offered(declined, 5) is None, "nothing entered the history"


def test_the_prompt_seeds_the_history() -> None:
    made = session(row([8, 9, 1], [2, 3]), prompt=[*range(50), 8, 9])
    assert offered(made, 1) == (2, 3)


def test_what_others_force_enters_the_history_uncounted() -> None:
    made = session(row([1, 2], [3, 4]))
    made.observe((1,))
    assert offered(made, 2) == (3, 4)
    assert made.counters.decode_steps == 1


def test_a_long_history_is_still_the_right_one() -> None:
    made = session(row([1, 2, 3, 4, 5, 6], [7, 8]))
    for _ in range(50):
        assert offered(made, 9, 9, 1, 2, 3, 4, 5) is None
    assert offered(made, 6) == (7, 8)


def test_a_proposal_must_be_committed_before_the_next_token() -> None:
    made = session(row([1], [2, 3]))
    proposal = made.push(1)
    assert proposal is not None
    with pytest.raises(AssertionError):
        made.push(2)
    with pytest.raises(AssertionError):
        made.commit(Proposal((2, 3), Policy.ASSERT, Origin.SCHEMA), 2)
    made.commit(proposal, 2)
    with pytest.raises(AssertionError):
        made.commit(proposal, 2)


# ---------------------------------------------------------------------------------- clamping


class Fixed:
    """A source with one thing to say."""

    name, window_needed = "fixed", 1

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.seen: list[int] = []

    def propose(self, view: View) -> Proposal | None:
        return self.proposal

    def observe(self, ids: Sequence[int]) -> None:
        self.seen += ids


def clamped(
    ids: Sequence[int],
    budget: float = math.inf,
    *,
    policy: Policy = Policy.ASSERT,
    origin: Origin = Origin.ECHO,
    max_span: int = 32,
) -> tuple[tuple[int, ...], Policy, int] | None:
    """Ids, policy and the count of cut ones of what comes of a proposal."""
    source = Fixed(Proposal(tuple(ids), policy, origin))
    made = session(max_span=max_span, extras=[source])
    found = made.push(1, budget)
    return None if found is None else (found.ids, found.policy, made.counters.index_truncated)


STRICT = {"origin": Origin.SCHEMA}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([2, 3, EOS, 4], (2, 3)),
        ([2, 3, EOS], (2, 3)),
        ([2, EOS, 3], None),
        ([EOS, 2, 3], None),
        ([2], None),
        ([2, 3], (2, 3)),
    ],
)
def test_an_end_of_the_turn_is_never_put_in(
    ids: list[int], expected: tuple[int, ...] | None
) -> None:
    found = clamped(ids, **STRICT)  # type: ignore[arg-type]  # of a helper
    assert (found and found[0]) == expected
    if found:
        assert found[1:] == (Policy.ASSERT, int(len(ids) > len(found[0])))


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 2.9, 4, math.inf])
def test_the_budget_cuts(budget: float) -> None:
    found = clamped([2, 3, 4], budget, **STRICT)  # type: ignore[arg-type]  # of a helper
    if budget < 2:
        assert found is None
        return
    size = 3 if budget == math.inf else min(3, int(budget))
    assert found == ((2, 3, 4)[:size], Policy.ASSERT, int(size < 3))


def test_the_largest_span_cuts() -> None:
    assert clamped(range(2, 20), max_span=5, **STRICT) == (  # type: ignore[arg-type]  # of a helper
        (2, 3, 4, 5, 6),
        Policy.ASSERT,
        1,
    )


def test_delimiters_end_echoes_alone() -> None:
    ids = [2, QUOTE, 3, QUOTE, 4]
    assert clamped(ids, **STRICT) == (tuple(ids), Policy.ASSERT, 0)  # type: ignore[arg-type]  # of a helper
    assert clamped(ids) == ((2, QUOTE), Policy.ASSERT, 1), "it still ends at a delimiter"
    assert clamped([QUOTE, 2]) is None
    assert clamped([2, 3, QUOTE], 2) == ((2, 3), Policy.VERIFY, 1), "cut elsewhere: no longer sure"
    assert clamped([2, 3, 4, QUOTE], policy=Policy.VERIFY) == (
        (2, 3, 4, QUOTE),
        Policy.VERIFY,
        0,
    )


def test_what_is_discarded_leaves_the_next_source_its_turn() -> None:
    first = Fixed(Proposal((2, EOS), Policy.ASSERT, Origin.ECHO, branch_stop=True))
    second = Fixed(Proposal((3, 4), Policy.VERIFY, Origin.ECHO))
    made = session(extras=[first, second])
    found = made.push(1)
    assert found == second.proposal
    assert (made.counters.branch_stops, made.counters.index_truncated) == (1, 0)


def test_strict_rows_come_before_all_other_sources() -> None:
    source = Fixed(Proposal((8, 9), Policy.VERIFY, Origin.ECHO))
    made = session(row([1], [2, 3]), extras=[source])
    assert offered(made, 1) == (2, 3)


# ------------------------------------------------------------------------------------ counts


def test_counts() -> None:
    made = session(
        row([1], [2, 3, 4]), extras=[Fixed(Proposal((8, 9), Policy.VERIFY, Origin.ECHO))]
    )
    for token, taken in ((1, 3), (7, 2), (7, 1), (7, 0), (1, 99), (1, -1)):
        proposal = made.push(token)
        assert proposal is not None
        made.commit(proposal, taken)
    assert made.counters.render() == {
        "events": 4,
        "injected": 9,
        "strict": 6,
        "echo": 3,
        "spanLens": [3, 2, 1, 3],
        "wastedSamples": 0,
        "parseFallback": 0,
        "indexTruncated": 0,
        "decodeSteps": 6,
        "verifyEvents": 2,
        "verifyAccepted": 3,
        "verifyRejected": 3,
        "verifyUnsupported": 0,
        "checkpointMs": 0.0,
        "branchStops": 0,
    }


def test_counts_add_up() -> None:
    total = Counters()
    for n in (1, 2):
        total.add(Counters(events=n, span_lens=[n], checkpoint_ms=0.5))
    assert (total.events, total.span_lens, total.checkpoint_ms) == (3, [1, 2], 1.0)


def test_sources_see_every_id_once_and_in_order() -> None:
    source = Fixed(Proposal((8,), Policy.VERIFY, Origin.ECHO))
    made = session(row([1], [2, 3, 4]), prompt=[5], extras=[source])
    proposal = made.push(1)
    assert proposal is not None
    made.commit(proposal, 2)
    made.observe((6, 7))
    assert made.push(9) is None
    assert source.seen == [1, 2, 3, 6, 7, 9]


def test_a_parse_failure_ends_strict_rows_if_they_had_a_part_in_it() -> None:
    made = session(row([1], [2, 3]))
    made.note_parse_failure()
    proposal = made.push(1)
    assert proposal is not None and made.counters.parse_fallback == 0
    made.commit(proposal, 2)
    made.note_parse_failure()
    assert made.counters.parse_fallback == 1
    assert made.push(1) is None


def test_echo_goes_on_after_a_parse_failure() -> None:
    plan = FillPlan(StrictPlan((row([1], [2, 3]),)), EchoConfig(k=2))
    made = Session(plan, [5, 6, 7, 8, 9])
    proposal = made.push(1)
    assert proposal is not None
    made.commit(proposal, 2)
    made.note_parse_failure()
    assert made.push(5) is None
    echoed = made.push(6)
    assert echoed is not None and echoed.origin is Origin.ECHO
