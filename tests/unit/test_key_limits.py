"""Limits of one key, by a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from loramux.errors import KeyLimitReached
from loramux.server.limits import Account, Bucket, Limits
from tests.fake_clock import FakeClock


def account(clock: FakeClock, **limits: float) -> Account:
    return Account("tenant-a", Limits(**limits), clock=clock)


def test_bucket_begins_full_and_comes_back_at_its_rate(clock: FakeClock) -> None:
    bucket = Bucket(rate=2.0, capacity=10.0, clock=clock)
    assert bucket.wait(10) == 0
    bucket.take(10)
    assert bucket.wait(3) == pytest.approx(1.5)
    clock.now += 1.0
    assert bucket.wait(3) == pytest.approx(0.5)
    clock.now += 0.5
    assert bucket.wait(3) == 0


def test_bucket_holds_no_more_than_its_capacity(clock: FakeClock) -> None:
    bucket = Bucket(rate=2.0, capacity=10.0, clock=clock)
    clock.now += 1_000
    bucket.take(10)
    assert bucket.wait(1) == pytest.approx(0.5)


def test_bucket_below_zero_pays_back_first(clock: FakeClock) -> None:
    bucket = Bucket(rate=2.0, capacity=10.0, clock=clock)
    bucket.take(30)
    assert bucket.wait(2) == pytest.approx(11.0)


def test_more_than_the_capacity_needs_a_full_bucket(clock: FakeClock) -> None:
    bucket = Bucket(rate=2.0, capacity=10.0, clock=clock)
    assert bucket.wait(50) == 0
    bucket.take(1)
    assert bucket.wait(50) == pytest.approx(0.5)


def test_a_bucket_that_changes_keeps_what_it_holds(clock: FakeClock) -> None:
    bucket = Bucket(rate=1.0, capacity=10.0, clock=clock)
    bucket.take(8)
    clock.now += 1.0  # 3 are left, at the old rate
    bucket.change(rate=4.0, capacity=100.0)
    assert bucket.wait(3) == 0
    assert bucket.wait(11) == pytest.approx(2.0)
    bucket.change(rate=1.0, capacity=2.0)
    assert bucket.wait(2) == 0
    bucket.take(2)
    assert bucket.wait(1) == pytest.approx(1.0)


def test_a_debt_outlives_a_change(clock: FakeClock) -> None:
    bucket = Bucket(rate=1.0, capacity=10.0, clock=clock)
    bucket.take(30)
    bucket.change(rate=10.0, capacity=100.0)
    assert bucket.wait(10) == pytest.approx(3.0)


def test_limits_that_change_hold_at_once_and_give_no_new_start(clock: FakeClock) -> None:
    one = account(clock, requests_per_second=2, tokens_per_minute=60)
    one.enter()
    one.enter()
    one.spend(60)
    one.change_limits(Limits(requests_per_second=2, tokens_per_minute=60, max_in_flight=1))
    with pytest.raises(KeyLimitReached, match="max_in_flight of 1"):
        one.enter()
    one.leave()
    one.leave()
    with pytest.raises(KeyLimitReached, match="requests_per_second of 2"):
        one.enter()
    with pytest.raises(KeyLimitReached, match="tokens_per_minute of 60"):
        one.spend_prompt(1)
    one.change_limits(Limits())
    one.enter()
    one.spend_prompt(1000)
    assert (one.num_requests, one.num_tokens, one.in_flight) == (5, 1060, 1)


def test_a_limit_that_is_new_begins_full(clock: FakeClock) -> None:
    one = account(clock)
    one.spend(1000)
    one.change_limits(Limits(tokens_per_minute=60))
    one.spend_prompt(60)
    with pytest.raises(KeyLimitReached):
        one.spend_prompt(1)


def test_who_waits_as_long_as_was_said_finds_enough() -> None:
    draw = random.Random(0)
    for _ in range(2_000):
        clock = FakeClock()
        rate = draw.choice((1 / 60, 0.1, 0.3, 7.0, 1_000 / 60, 1e5))
        bucket = Bucket(rate=rate, capacity=max(1.0, rate), clock=clock)
        for _ in range(5):
            bucket.take(draw.uniform(0, 2 * rate))
            clock.now += bucket.wait(1)
            assert bucket.wait(1) == 0


@pytest.mark.parametrize(("rate", "burst"), [(3, 3), (1, 1), (0.25, 1), (2.5, 2)])
def test_requests_a_second_let_one_seconds_worth_in_at_once(
    clock: FakeClock, rate: float, burst: int
) -> None:
    tenant = account(clock, requests_per_second=rate)
    for _ in range(burst):
        tenant.enter()
    with pytest.raises(KeyLimitReached, match="'tenant-a' has reached its requests_per_second"):
        tenant.enter()


def test_over_a_long_time_the_rate_holds(clock: FakeClock) -> None:
    tenant = account(clock, requests_per_second=2)
    entered = 0
    for _ in range(1_000):
        clock.now += 0.1
        try:
            tenant.enter()
        except KeyLimitReached:
            continue
        entered += 1
    assert entered == pytest.approx(200, abs=3)


def test_the_wait_is_in_whole_seconds_rounded_up(clock: FakeClock) -> None:
    tenant = account(clock, requests_per_second=0.4)
    tenant.enter()
    with pytest.raises(KeyLimitReached) as refused:
        tenant.enter()
    assert refused.value.retry_after == 3
    assert "again in 3 s" in str(refused.value)
    clock.now += 3
    tenant.enter()


def test_short_waits_are_a_second(clock: FakeClock) -> None:
    tenant = account(clock, requests_per_second=100)
    for _ in range(100):
        tenant.enter()
    with pytest.raises(KeyLimitReached) as refused:
        tenant.enter()
    assert refused.value.retry_after == 1


def test_refused_requests_use_nothing(clock: FakeClock) -> None:
    tenant = account(clock, requests_per_second=1, max_in_flight=1)
    tenant.enter()
    clock.now += 1
    for _ in range(5):
        with pytest.raises(KeyLimitReached, match="max_in_flight of 1"):
            tenant.enter()
    tenant.leave()
    tenant.enter()
    assert tenant.in_flight == 1


def test_places_are_given_back(clock: FakeClock) -> None:
    tenant = account(clock, max_in_flight=2)
    tenant.enter()
    tenant.enter()
    with pytest.raises(KeyLimitReached) as refused:
        tenant.enter()
    assert refused.value.retry_after == 1
    tenant.leave()
    tenant.enter()


def test_tokens_a_minute_come_back_evenly(clock: FakeClock) -> None:
    tenant = account(clock, tokens_per_minute=600)
    tenant.spend_prompt(600)
    with pytest.raises(KeyLimitReached, match="tokens_per_minute of 600") as refused:
        tenant.spend_prompt(100)
    assert refused.value.retry_after == 10
    clock.now += 10
    tenant.spend_prompt(100)


def test_answers_may_go_below_zero_and_hold_off_the_next_prompt(clock: FakeClock) -> None:
    tenant = account(clock, tokens_per_minute=60)
    tenant.spend_prompt(60)
    for _ in range(120):
        tenant.spend(1)
    with pytest.raises(KeyLimitReached) as refused:
        tenant.spend_prompt(1)
    assert refused.value.retry_after == 121


def test_a_prompt_above_the_minutes_tokens_gets_its_turn(clock: FakeClock) -> None:
    tenant = account(clock, tokens_per_minute=60)
    tenant.spend_prompt(100)
    clock.now += 99
    with pytest.raises(KeyLimitReached):
        tenant.spend_prompt(100)
    clock.now += 1
    tenant.spend_prompt(100)


def test_without_limits_nothing_is_refused_and_all_is_counted(clock: FakeClock) -> None:
    tenant = account(clock)
    for _ in range(1_000):
        tenant.enter()
        tenant.spend_prompt(10**9)
    assert (tenant.in_flight, tenant.num_requests, tenant.num_tokens) == (1_000, 1_000, 10**12)
    assert not tenant.num_refused


def test_refusals_are_counted_by_limit(clock: FakeClock) -> None:
    tenant = account(clock, max_in_flight=1, tokens_per_minute=1)
    tenant.enter()
    tenant.spend(5)
    for refuse in (tenant.enter, tenant.enter, lambda: tenant.spend_prompt(1)):
        with pytest.raises(KeyLimitReached):
            refuse()
    assert tenant.num_refused == {"max_in_flight": 2, "tokens_per_minute": 1}
    assert tenant.num_requests == 3
