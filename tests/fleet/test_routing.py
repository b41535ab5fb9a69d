"""Routing: least load in tokens, sticky sessions and prefix affinity, against random and round robin."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import InvalidConfig
from drivetrain_fleet.prefix_index import BLOCK, Blocks, PrefixIndex
from drivetrain_fleet.routing import Load, Router, RoutingPolicy, Work

TOKENS = st.lists(st.integers(0, 3), max_size=5 * BLOCK)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


# The index --------------------------------------------------------------------------------------------------------


@given(TOKENS, TOKENS)
def test_what_matched_is_the_longest_common_prefix_in_whole_blocks(seen: list[int], asked: list[int]) -> None:
    common = next((i for i, (a, b) in enumerate(zip(seen, asked, strict=False)) if a != b), min(len(seen), len(asked)))
    index = PrefixIndex(1000)
    index.add(Blocks.of(seen))
    assert index.matched(Blocks.of(asked)) == common // BLOCK * BLOCK


@given(st.lists(TOKENS, max_size=8), TOKENS, st.integers(0, 8), st.data())
def test_a_match_of_at_least_so_many_tokens_is_the_whole_match_or_none(
    seen: list[list[int]], asked: list[int], capacity: int, data: st.DataObject
) -> None:
    index = PrefixIndex(capacity)
    for one in seen:
        index.add(Blocks.of(one))
    blocks = Blocks.of(asked)
    least = BLOCK * data.draw(st.integers(0, len(blocks)))
    whole = index.matched(blocks)
    assert index.matched(blocks, at_least=least) == (whole if whole >= least else 0)


@given(TOKENS, TOKENS)
def test_a_prompt_and_its_answer_are_the_next_prompt(first: list[int], answer: list[int]) -> None:
    assert Blocks.of(first).followed_by(answer) == Blocks.of(first + answer)


def test_an_adapter_has_a_cache_of_its_own() -> None:
    index = PrefixIndex(10)
    index.add(Blocks.of(prompt(0, 100), "one"))
    assert index.matched(Blocks.of(prompt(0, 100), "one")) == 96
    assert index.matched(Blocks.of(prompt(0, 100), "other")) == 0
    assert index.matched(Blocks.of(prompt(0, 100))) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 500)), max_size=40), st.integers(1, 50))
def test_memory_is_bounded(prompts: list[tuple[int, int]], capacity: int) -> None:
    index = PrefixIndex(capacity)
    for seed, length in prompts:
        index.add(Blocks.of(prompt(seed, length)))
        assert len(index) <= capacity


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    index = PrefixIndex(10)
    index.add(Blocks.of(prompt(0, 8 * BLOCK)))
    index.add(Blocks.of(prompt(1, 5 * BLOCK)))
    assert index.matched(Blocks.of(prompt(0, 8 * BLOCK))) == 5 * BLOCK
    assert index.matched(Blocks.of(prompt(1, 5 * BLOCK))) == 5 * BLOCK


# The choice -------------------------------------------------------------------------------------------------------


def loads(**tokens: int) -> dict[str, Load]:
    return {name: Load(tokens=count) for name, count in tokens.items()}


def test_the_least_load_in_tokens_is_chosen_not_the_fewest_requests() -> None:
    found = {"a": Load(tokens=9000, samples=1), "b": Load(tokens=500, samples=20)}
    assert Router().choose(Work(Blocks.of([1])), found) == "b"


def test_equal_loads_are_taken_in_turn() -> None:
    router, found = Router(), {name: Load() for name in "abc"}
    order = []
    for _ in range(6):
        name = router.choose(Work(Blocks.of([1])), found)
        assert name is not None
        found[name].taken += 1
        order.append(name)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_the_longest_prefix_is_preferred_and_yields_by_the_stated_margin() -> None:
    router = Router(RoutingPolicy(margin_tokens=1000, margin_ratio=2.0))
    work = Work(Blocks.of(prompt(0, 200)))
    router.sent(work, "a")
    longer = Work(Blocks.of(prompt(0, 200) + prompt(1, 100)))
    assert router.choose(longer, loads(a=900, b=0)) == "a"
    assert router.choose(longer, loads(a=1001, b=0)) == "b"
    assert router.choose(longer, loads(a=6000, b=4000)) == "a"  # above the margin, but not twice as much
    assert router.choose(longer, loads(a=8001, b=4000)) == "b"
    router.sent(longer, "b")
    assert router.choose(Work(Blocks.of(prompt(0, 200) + prompt(1, 100) + [5])), loads(a=0, b=900)) == "b"


def test_a_session_sticks_to_its_engine_while_that_takes_requests() -> None:
    router = Router(RoutingPolicy(sessions=2))
    work = Work(Blocks.of([1, 2]), session="s")
    router.sent(work, "b")
    assert router.choose(work, loads(a=0, b=50_000)) == "b"
    assert router.choose(work, loads(a=0)) == "a"
    for other in ("t", "u"):
        router.sent(Work(Blocks.of([1]), session=other), "a")
    assert router.choose(work, loads(a=0, b=50_000)) == "a"  # forgotten: the bound is two


def test_what_left_or_dropped_its_cache_is_not_preferred() -> None:
    router = Router()
    work = Work(Blocks.of(prompt(0, 100)), session="s")
    router.sent(work, "b")
    router.cache_dropped("b")
    assert router.choose(Work(work.blocks), loads(a=0, b=10)) == "a"
    router.sent(work, "b")
    router.forget("b")
    assert router.choose(work, loads(a=0, b=10)) == "a"
    assert router.choose(work, {}) is None


# Against random and round robin -----------------------------------------------------------------------------------


Chooser = Callable[[Work, dict[str, Load]], str]


def routed() -> Chooser:
    router = Router(RoutingPolicy(margin_tokens=20_000))

    def choose(work: Work, found: dict[str, Load]) -> str:
        name = router.choose(work, found)
        assert name is not None
        router.sent(work, name)
        return name

    return choose


def at_random(seed: int = 0) -> Chooser:
    rng = random.Random(seed)
    return lambda work, found: rng.choice(sorted(found))


def round_robin() -> Chooser:
    turn = [0]

    def choose(work: Work, found: dict[str, Load]) -> str:
        turn[0] += 1
        return sorted(found)[turn[0] % len(found)]

    return choose


def replay(choose: Chooser, engines: int = 4, sessions: int = 15, turns: int = 20) -> float:
    """Replay sessions whose turns build on each other; return the share of prompt tokens that were cached."""
    caches = {f"e{i}": PrefixIndex(10_000) for i in range(engines)}
    found = {name: Load() for name in caches}
    texts = [prompt(0, 400) + prompt(session + 1, 200) for session in range(sessions)]
    hits = total = 0
    under_way: list[tuple[str, int]] = []
    for turn in range(turns):
        for session in range(len(texts)):
            text = texts[session]
            if turn == turns // 2 and session % 5 < 2:  # a sub-agent begins with what its parent has so far
                texts.append(text + prompt(1000 + session, 100))
            blocks = Blocks.of(text)
            name = choose(Work(blocks), found)
            hits += caches[name].matched(blocks)
            total += len(blocks) * BLOCK
            caches[name].add(blocks)
            found[name].tokens += len(text)
            under_way.append((name, len(text)))
            if len(under_way) > 2 * engines:
                done, tokens = under_way.pop(0)
                found[done].tokens -= tokens
            texts[session] = text + prompt(turn * 100 + session, 120)
    return hits / total


def test_more_of_the_prompts_is_cached_than_by_random_or_round_robin() -> None:
    ours, theirs = replay(routed()), max(replay(at_random()), replay(round_robin()))
    assert ours > 0.9
    assert ours > theirs + 0.05


def spread(choose: Chooser, lengths: Sequence[int], engines: int = 4) -> float:
    """Give each sample to an engine; return the largest load over the mean."""
    found = {f"e{i}": Load() for i in range(engines)}
    for seed, length in enumerate(lengths):
        load = found[choose(Work(Blocks.of(prompt(seed, 8))), found)]
        load.tokens += length
        load.taken += 1
    tokens = [load.tokens for load in found.values()]
    return max(tokens) / (sum(tokens) / engines)


def test_tokens_are_spread_more_evenly_than_by_random_or_round_robin() -> None:
    rng = random.Random(7)
    lengths = [int(rng.paretovariate(1.2) * 100) for _ in range(400)]
    ours = spread(routed(), lengths)
    assert ours <= spread(round_robin(), lengths)
    assert ours <= spread(at_random(), lengths)
    assert ours <= 1.1 or ours == max(lengths) / (sum(lengths) / 4)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200)), max_size=30))
def test_the_same_calls_give_the_same_answers(calls: list[tuple[int, int]]) -> None:
    def play() -> list[str | None]:
        router, found = Router(), {name: Load() for name in "abc"}
        answers: list[str | None] = []
        for seed, length in calls:
            work = Work(Blocks.of(prompt(seed, length)), session=str(seed) if seed % 2 else None)
            name = router.choose(work, found)
            assert name is not None
            router.sent(work, name)
            found[name].tokens += length
            found[name].taken += 1
            answers.append(name)
        return answers

    assert play() == play()


class CountedIndex(PrefixIndex):
    """Counts the blocks that it looks up."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._seen = counted = CountedBlocks()
        self.blocks = counted


class CountedBlocks(OrderedDict[int, None]):
    lookups = 0

    def __contains__(self, key: object) -> bool:
        self.lookups += 1
        return super().__contains__(key)


def test_a_shared_prefix_is_compared_once_and_not_once_for_each_engine() -> None:
    engines, length = 100, 200
    names = [f"engine {number}" for number in range(engines)]
    indices = {name: CountedIndex(1000) for name in names}
    router = Router(_prefixes=dict(indices))
    work = Work(Blocks.of(prompt(0, length * BLOCK)))
    for name in names:
        router.sent(work, name)
    assert router.choose(work, {name: Load() for name in names}) == names[0]
    assert sum(index.blocks.lookups for index in indices.values()) <= engines + length


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefix_affinity", 1),
        ("margin_tokens", -1),
        ("margin_tokens", True),
        ("margin_ratio", 0.5),
        ("margin_ratio", float("nan")),
        ("margin_ratio", "2"),
        ("prefix_blocks", 1.5),
        ("sessions", None),
    ],
)
def test_wrong_values_of_the_policy_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=field) as caught:
        RoutingPolicy(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
