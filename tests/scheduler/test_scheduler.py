"""Budgets, order, admission, preemption, aborts and sharing, each in a situation made for it.

Every step is also checked by the driver and by the fake runner, which knows what each slot must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from server.kvpool.layout import EVERYTHING, Visibility
from server.scheduler.request import Request, Status
from server.scheduler.scheduler import MAX_OVERTAKES, NeverFits
from server.step import SamplingParams
from tests.scheduler.alone import VOCAB_SIZE, outputs_alone
from tests.scheduler.driver import Driver, config


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def counts(driver: Driver) -> list[int]:
    """Tokens of each sequence in the last plan."""
    assert driver.plan is not None
    return [int(count) for count in np.diff(driver.plan.query_starts)]


class TestBudget:
    def test_decodes_come_first_and_prompts_share_the_rest_in_order(self) -> None:
        driver = Driver(config(max_num_seqs=4, max_num_batched_tokens=10))
        for seed in range(2):
            driver.add(prompt(3, seed), 30)
        driver.step()
        driver.add(prompt(20, 8), 5)
        driver.add(prompt(20, 9), 5)
        seen = []
        for _ in range(6):
            driver.step()
            seen.append(counts(driver))
        assert seen == [[1, 1, 8], [1, 1, 8], [1, 1, 4, 4], [1, 1, 1, 7], [1, 1, 1, 7], [1, 1, 1, 2]]
        driver.run()
        driver.check_outputs()

    def test_no_step_exceeds_the_budget_however_it_is_divided(self) -> None:
        for budget in (12, 13, 19, 64):
            driver = Driver(config(max_num_batched_tokens=budget))
            for seed in range(12):
                driver.add(prompt(seed * 3 + 1, seed), 9)
            driver.run()
            driver.check_outputs()
            driver.check_idle()

    def test_outputs_do_not_depend_on_the_budget_or_the_block_size(self) -> None:
        for size, budget in ((1, 9), (2, 10), (3, 31), (4, 12), (16, 24)):
            driver = Driver(config(block_size=size, num_blocks=256 // size, max_num_batched_tokens=budget))
            for seed in range(10):
                driver.add(prompt(seed * 2 + 1, seed % 4), 9, SamplingParams(seed=seed))
            driver.run()
            driver.check_outputs()

    def test_a_budget_that_could_starve_prompts_is_refused(self) -> None:
        with pytest.raises(ValueError, match="max_num_seqs \\+ block_size"):
            config(max_num_seqs=8, block_size=4, max_num_batched_tokens=11)
        assert config(max_num_seqs=8, block_size=4, max_num_batched_tokens=12)

    def test_a_score_budget_that_could_never_score_is_refused(self) -> None:
        with pytest.raises(ValueError, match="max_scored_tokens"):
            config(max_scored_tokens=0)


class TestFairness:
    def test_a_long_prompt_never_makes_a_decode_skip_a_step(self) -> None:
        driver = Driver(config(num_blocks=200, max_num_batched_tokens=12))
        decodes = [driver.add(prompt(4, seed), 60) for seed in range(4)]
        driver.step()
        driver.step()
        driver.add(prompt(400), 1)
        for _ in range(40):
            before = [request.num_outputs for request in decodes]
            driver.step()
            assert [request.num_outputs for request in decodes] == [n + 1 for n in before]
            assert driver.plan is not None
            assert driver.plan.num_tokens == 12, "the prompt takes what the decodes leave, and no more"

    @pytest.mark.parametrize("length", [1, 8, 33, 200])
    def test_decodes_never_starve_a_prompt(self, length: int) -> None:
        """With every other place decoding, a prompt gets at least `budget - max_num_seqs + 1` tokens of each step."""
        limits = config(num_blocks=300, max_num_seqs=8, max_num_batched_tokens=12)
        driver = Driver(limits)
        for seed in range(7):
            driver.add(prompt(4, seed), 100)
        while any(request.is_prefilling for request in driver.scheduler.running) or driver.scheduler.waiting:
            driver.step()
        begun = driver.steps
        long = driver.add(prompt(length, 99), 3)
        while driver.records[long].first_step is None:
            driver.step()
        share = limits.max_num_batched_tokens - limits.max_num_seqs + 1
        assert driver.steps - begun == -(-length // share)

    def test_equal_requests_finish_in_the_order_they_came(self) -> None:
        for num_blocks in (6, 20, 64):
            driver = Driver(config(num_blocks=num_blocks))
            requests = [driver.add(prompt(9, seed), 12) for seed in range(20)]
            driver.run()
            assert driver.finished == requests
            driver.check_outputs()

    def test_a_large_request_at_the_head_is_not_overtaken_for_ever(self) -> None:
        driver = Driver(config(num_blocks=20))
        for seed in range(4):
            driver.add(prompt(9, seed), 12)
        driver.step()
        large = driver.add(prompt(60, 50), 8)
        little = [driver.add(prompt(2, 60 + seed), 2) for seed in range(2 * MAX_OVERTAKES)]
        driver.run()
        first = driver.records[large].first_step
        assert first is not None
        starts = [start for request in little if (start := driver.records[request].first_step) is not None]
        assert len(starts) == len(little)
        assert sum(start < first for start in starts) == MAX_OVERTAKES

    def test_what_is_less_urgent_takes_no_blocks_from_the_head(self) -> None:
        driver = Driver(config(num_blocks=20))
        for seed in range(4):
            driver.add(prompt(9, seed), 12)
        driver.step()
        large = driver.add(prompt(60, 50), 8)
        small = driver.add(prompt(2, 60), 2, priority=1)
        driver.run()
        first, later = driver.records[large].first_step, driver.records[small].first_step
        assert first is not None
        assert later is not None
        assert later >= first

    def test_what_was_preempted_is_not_overtaken(self) -> None:
        """The blocks that it waits for would be gone again."""
        driver = Driver(config(num_blocks=8, prefix_caching=False))
        first, second = driver.add(prompt(8, 1), 20), driver.add(prompt(8, 2), 20)
        while not second.num_preemptions:
            driver.step()
        small = driver.add(prompt(1, 3), 1)
        while second.status is Status.WAITING:
            driver.step()
            assert second.status is Status.RUNNING or small.status is Status.WAITING
        driver.run()
        assert driver.finished.index(first) < driver.finished.index(small)
        driver.check_outputs()

    def test_under_the_fair_policy_nobody_is_overtaken(self) -> None:
        driver = Driver(config(num_blocks=20, policy="fair", prefix_caching=False))
        for seed in range(4):
            driver.add(prompt(9, seed), 12)
        driver.step()
        large = driver.add(prompt(60, 50), 8)
        small = driver.add(prompt(2, 60), 2)
        while large.status is Status.WAITING:
            assert small.status is Status.WAITING
            driver.step()
        driver.run()
        driver.check_outputs()

    def test_lower_priority_numbers_run_first(self) -> None:
        driver = Driver(config(max_num_seqs=1))
        last = driver.add(prompt(5, 1), 3, priority=5)
        middle = driver.add(prompt(5, 2), 3)
        first = driver.add(prompt(5, 3), 3, priority=-5)
        same = driver.add(prompt(5, 4), 3)
        driver.run()
        assert driver.finished == [first, middle, same, last]

    def test_the_least_urgent_is_preempted_though_it_came_first(self) -> None:
        driver = Driver(config(num_blocks=8))
        old = driver.add(prompt(8, 1), 20, priority=1)
        driver.step()
        urgent = driver.add(prompt(8, 2), 20)
        driver.run()
        assert old.num_preemptions > 0
        assert urgent.num_preemptions == 0
        assert driver.finished == [urgent, old]
        driver.check_outputs()

    def test_an_urgent_request_is_not_held_up_by_what_waits(self) -> None:
        """A large unimportant request at the head of the queue waits for blocks; an urgent one goes before it."""
        driver = Driver(config(num_blocks=10))
        driver.add(prompt(12, 1), 20)
        driver.step()
        large = driver.add(prompt(38, 2), 2, priority=3)
        driver.step()
        assert large.status is Status.WAITING
        urgent = driver.add(prompt(6, 3), 4)
        driver.step()
        assert urgent.status is Status.RUNNING
        assert large.status is Status.WAITING
        driver.run()
        driver.check_outputs()


class TestAdmission:
    def test_a_prompt_is_admitted_only_beside_a_block_for_each_running_request(self) -> None:
        driver = Driver(config(num_blocks=10, prefix_caching=False, max_num_batched_tokens=64))
        driver.add(prompt(15, 1), 2)  # four blocks
        driver.step()
        assert driver.scheduler.stats().blocks_free == 6
        driver.add(prompt(23, 2), 2)  # six: fits, but leaves no block for the one that runs
        driver.step()
        assert driver.scheduler.stats().waiting_by_reason["kv_blocks"] == 1

    def test_the_headroom_can_be_met_exactly(self) -> None:
        driver = Driver(config(num_blocks=10, prefix_caching=False, max_num_batched_tokens=64))
        driver.add(prompt(15, 1), 4)
        driver.step()
        driver.add(prompt(19, 2), 2)
        driver.step()
        assert len(driver.scheduler.running) == 2

    @pytest.mark.parametrize("caching", [True, False])
    def test_reserve_admits_only_what_can_reach_its_end(self, caching: bool) -> None:
        driver = Driver(config(num_blocks=12, admission="reserve", prefix_caching=caching))
        requests = [driver.add(prompt(8, seed % 3), 17) for seed in range(8)]  # six blocks each
        most = 0
        while driver.scheduler.has_work:
            driver.step()
            most = max(most, len(driver.scheduler.running))
        assert most == 2 if not caching else most >= 2
        assert sum(request.num_preemptions for request in requests) == 0
        driver.check_outputs()
        driver.check_idle()

    def test_reserve_counts_on_no_block_that_another_may_go_on_seeing(self) -> None:
        """What slides out of one request's window while others see it is free to nobody."""
        window = (Visibility(window=29),)
        driver = Driver(config(num_blocks=27, admission="reserve", groups=window, max_num_batched_tokens=12))
        driver.add(prompt(40), 1)
        driver.run()
        requests = [driver.add([*prompt(40), seed], 40) for seed in range(5)]
        driver.run()  # the driver sees that nobody is preempted
        assert [request.num_preemptions for request in requests] == [0] * 5
        driver.check_outputs()
        driver.check_idle()

    def test_optimistic_runs_more_at_once_than_reserve(self) -> None:
        steps = {}
        for admission in ("optimistic", "reserve"):
            driver = Driver(config(num_blocks=24, admission=admission))
            for seed in range(16):
                driver.add(prompt(4, seed), 40, SamplingParams(stop_token_ids=frozenset(range(12))))
            driver.run()
            driver.check_outputs()
            steps[admission] = driver.steps
        assert steps["optimistic"] < steps["reserve"]

    def test_hits_count_as_taken_when_they_were_only_cached(self) -> None:
        """A hit on a cached block takes it out of the available ones: an admission that forgets this comes up short."""
        driver = Driver(config(num_blocks=8, max_num_batched_tokens=64))
        shared = prompt(16, 1)
        driver.add(shared, 1)
        driver.run()
        assert driver.scheduler.stats().blocks_cached == 4
        driver.add(prompt(12, 2), 8)
        driver.step()  # holds four; the other four are cached and nothing is free
        driver.add([*shared, 1, 2, 3], 2)
        driver.run()
        driver.check_outputs()

    @pytest.mark.parametrize("admission", ["optimistic", "reserve"])
    def test_what_never_fits_is_refused_on_arrival_and_leaves_no_trace(self, admission: str) -> None:
        driver = Driver(config(num_blocks=4, admission=admission))  # 16 tokens
        exact = driver.add(prompt(10, 1), 7)  # the last token is never written
        for length, max_tokens in ((10, 8), (17, 0), (16, 2), (200, 4)):
            with pytest.raises(NeverFits, match="16"):
                driver.scheduler.add(driver.request(prompt(length, 2), max_tokens))
        fitting = [driver.add(prompt(16, 3), 0), driver.add(prompt(16, 4), 1), driver.add(prompt(1, 5), 16)]
        driver.run()
        assert driver.finished == [exact, *fitting]
        driver.check_outputs()
        driver.check_idle()

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(ValueError, match="prompt"):
            Driver(config()).add([], 4)

    @pytest.mark.parametrize("admission", ["optimistic", "reserve"])
    @pytest.mark.parametrize("caching", [True, False])
    def test_every_pool_from_fits_one_upwards_finishes_everything(self, admission: str, caching: bool) -> None:
        """The longest request takes 7 blocks."""
        for num_blocks in range(7, 24):
            driver = Driver(config(num_blocks=num_blocks, admission=admission, prefix_caching=caching))
            rng = random.Random(num_blocks)
            for seed in range(14):
                length = rng.randint(1, 20)
                driver.add(prompt(length, seed % 5), 29 - length if seed % 4 == 0 else rng.randint(0, 8))
            driver.run(max_steps=600)
            driver.check_outputs()
            driver.check_idle()


class TestPreemption:
    def test_a_preempted_request_goes_on_where_it_was(self) -> None:
        for caching in (True, False):
            driver = Driver(config(num_blocks=8, block_size=16, max_num_seqs=2, prefix_caching=caching))
            params = SamplingParams(seed=7, temperature=0.8)
            requests = [driver.add(prompt(33, seed), 40, params) for seed in range(2)]  # five blocks each
            driver.run()
            assert driver.scheduler.stats().preemptions >= 1
            for request in requests:
                assert request.num_prompt == 33
                assert request.num_outputs == 40
                assert driver.records[request].finish_reason == "length"
            driver.check_outputs()
            driver.check_idle()

    def test_forced_preemption_at_any_moment_changes_nothing(self) -> None:
        for seed in range(30):
            rng = random.Random(seed)
            driver = Driver(config(prefix_caching=seed % 2 == 0))
            for index in range(10):
                scored = rng.choice((None, 0))
                driver.add(prompt(rng.randint(1, 20), index % 4), rng.randint(4, 12), prompt_logprobs=scored)
            while driver.scheduler.has_work:
                if driver.scheduler.running and rng.random() < 0.3:
                    driver.scheduler.preempt(rng.choice(driver.scheduler.running))
                driver.step()
                assert driver.steps < 1000
            assert driver.scheduler.stats().preemptions > 0
            driver.check_outputs()
            driver.check_idle()

    def test_a_preempted_request_goes_before_those_that_came_later(self) -> None:
        driver = Driver(config(num_blocks=12))
        first, second = driver.add(prompt(8, 1), 30), driver.add(prompt(8, 2), 30)
        driver.step()
        third = driver.add(prompt(8, 3), 30)
        driver.scheduler.preempt(second)
        assert driver.scheduler.waiting == [second, third]
        driver.run()
        assert driver.finished == [first, second, third]

    def test_a_preempted_request_finds_its_own_blocks_again(self) -> None:
        driver = Driver(config())
        request = driver.add(prompt(16, 1), 12)
        for _ in range(6):
            driver.step()
        assert request.num_computed == 21
        driver.scheduler.preempt(request)
        driver.step()
        assert counts(driver) == [2], "20 of its 22 tokens are in five full blocks"
        assert driver.scheduler.stats().recomputed_tokens == 1
        driver.run()
        driver.check_outputs()

    def test_tokens_computed_again_are_counted_and_tokens_found_are_not(self) -> None:
        driver = Driver(config(prefix_caching=False))
        request = driver.add(prompt(16, 1), 12)
        for _ in range(6):
            driver.step()
        driver.scheduler.preempt(request)
        driver.run()
        assert driver.scheduler.stats().recomputed_tokens == 21

    def test_decodes_that_were_found_whole_again_stand_with_the_decodes(self) -> None:
        """After a preemption all but the newest token may be cached: such a request decodes from the first step on."""
        driver = Driver(config())
        request = driver.add(prompt(16, 1), 12)
        for _ in range(5):
            driver.step()
        assert request.num_computed == 20, "five full blocks"
        driver.scheduler.preempt(request)
        driver.add(prompt(10, 2), 2, priority=-1)
        driver.step()  # the fake runner checks that the first num_decodes sequences are decodes
        assert driver.plan is not None
        assert driver.plan.num_decodes == 1
        assert counts(driver) == [1, 10]
        driver.run()
        driver.check_outputs()


class TestAbort:
    def test_while_waiting(self) -> None:
        driver = Driver(config(max_num_seqs=1))
        driver.add(prompt(5, 1), 5)
        waiting = driver.add(prompt(5, 2), 5)
        driver.step()
        driver.abort(waiting)
        driver.run()
        driver.check_outputs()
        driver.check_idle()

    def test_before_the_first_step(self) -> None:
        driver = Driver(config())
        driver.abort(driver.add(prompt(5, 1), 5))
        assert driver.scheduler.plan() is None
        driver.check_idle()

    def test_half_way_through_a_prompt_frees_its_blocks_at_once(self) -> None:
        driver = Driver(config(max_num_batched_tokens=12, prefix_caching=False))
        request = driver.add(prompt(50, 1), 5)
        driver.step()
        assert request.is_prefilling
        assert driver.scheduler.stats().blocks_used == 13
        driver.abort(request)
        assert driver.scheduler.stats().blocks_used == 0
        driver.check_idle()

    def test_while_decoding(self) -> None:
        driver = Driver(config())
        request = driver.add(prompt(5, 1), 50)
        for _ in range(4):
            driver.step()
        driver.abort(request)
        driver.check_idle()
        driver.check_outputs()

    def test_after_a_preemption(self) -> None:
        driver = Driver(config(num_blocks=8))
        first, second = driver.add(prompt(8, 1), 20), driver.add(prompt(8, 2), 20)
        while second.status is not Status.WAITING or not second.num_preemptions:
            driver.step()
        driver.abort(second)
        driver.run()
        assert driver.finished == [first]
        driver.check_outputs()
        driver.check_idle()

    def test_twice_and_after_the_end_does_nothing(self) -> None:
        driver = Driver(config())
        request = driver.add(prompt(5, 1), 3)
        driver.run()
        driver.scheduler.abort(request)
        again = driver.add(prompt(5, 2), 3)
        driver.step()
        driver.abort(again)
        driver.scheduler.abort(again)
        driver.check_idle()

    @pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
    def test_in_flight_keeps_the_blocks_until_the_step_is_over(self, steps_before: int) -> None:
        driver = Driver(config(max_num_batched_tokens=12, prefix_caching=False))
        request = driver.add(prompt(20, 1), 12)
        other = driver.add(prompt(4, 2), 12)
        for _ in range(steps_before):
            driver.step()
        outputs = request.num_outputs

        def abort() -> None:
            held = request.blocks
            assert held
            driver.abort(request)
            driver.scheduler.check_integrity()
            assert request.blocks == held, "the step in flight still writes to these"
            assert request not in driver.scheduler.running

        progress = driver.step(during=abort)
        assert request not in [item.request for item in progress]
        assert request.num_outputs == outputs, "a discarded token was appended"
        assert request.blocks == []
        driver.run()
        assert driver.finished == [other]
        driver.check_outputs()
        driver.check_idle()

    def test_in_flight_of_a_request_that_is_not_in_the_step_frees_at_once(self) -> None:
        driver = Driver(config(max_num_batched_tokens=12, max_num_seqs=8, prefix_caching=False, max_scored_tokens=12))
        driver.add(prompt(40, 1), 2, prompt_logprobs=0)
        driver.step()
        idle = driver.add(prompt(6, 2), 2)

        def abort() -> None:
            assert idle.status is Status.WAITING
            driver.abort(idle)

        driver.step(during=abort)
        driver.run()
        driver.check_outputs()
        driver.check_idle()

    def test_of_everything_in_flight(self) -> None:
        driver = Driver(config())
        requests = [driver.add(prompt(9, seed), 9) for seed in range(12)]
        driver.step()
        driver.step(during=lambda: [driver.abort(request) for request in requests] and None)
        driver.check_idle()
        assert driver.scheduler.plan() is None

    def test_nothing_of_an_aborted_step_is_shared(self) -> None:
        driver = Driver(config())
        shared = prompt(12, 1)
        request = driver.add(shared, 4)
        driver.step(during=lambda: driver.abort(request))
        assert driver.scheduler.stats().blocks_cached == 0
        driver.add(shared, 4)
        driver.run()
        driver.check_outputs()


class TestFail:
    def test_a_sequence_that_cannot_be_computed_ends_alone(self) -> None:
        driver = Driver(config())
        requests = [driver.add(prompt(9, seed), 9) for seed in range(4)]
        for _ in range(3):
            driver.step()
        computed = [request.num_computed for request in requests]
        assert driver.fail(1) == [requests[1]]
        assert requests[1].status is Status.FINISHED
        assert requests[1].blocks == []
        assert [request.num_computed for request in requests if request is not requests[1]] == [
            computed[0],
            *computed[2:],
        ]
        driver.run()
        assert driver.finished == [requests[0], *requests[2:]]
        driver.check_outputs()
        driver.check_idle()

    def test_one_that_was_aborted_meanwhile_has_ended_already(self) -> None:
        driver = Driver(config())
        first, second = driver.add(prompt(9, 1), 9), driver.add(prompt(9, 2), 9)
        driver.step()
        assert driver.fail(0, during=lambda: driver.abort(first)) == []
        assert first.blocks == []
        driver.run()
        assert driver.finished == [second]
        driver.check_outputs()
        driver.check_idle()

    def test_all_at_once(self) -> None:
        driver = Driver(config(max_num_batched_tokens=12))
        requests = [driver.add(prompt(30, seed), 9) for seed in range(2)]
        assert driver.fail(0, 1) == requests[:1], "the budget had room for the first alone"
        assert driver.fail(0) == requests[1:]
        driver.check_idle()
        assert driver.scheduler.stats().blocks_cached == 0, "what was not computed is not shared"


class TestEnds:
    def test_no_output_is_asked_for(self) -> None:
        driver = Driver(config(max_num_batched_tokens=12))
        request = driver.add(prompt(30, 1), 0)
        driver.run()
        assert driver.steps == 3
        assert driver.records[request].finish_reason == "length"
        assert request.num_outputs == 0
        driver.check_idle()

    def test_a_stop_token_ends_it_and_is_reported(self) -> None:
        driver = Driver(config())
        tokens, _ = outputs_alone(prompt(6, 1), SamplingParams(), 20)
        stop = tokens[7]
        request = driver.add(prompt(6, 1), 20, SamplingParams(stop_token_ids=frozenset({stop})))
        driver.run()
        assert driver.records[request].outputs == tokens[: tokens.index(stop) + 1]
        assert driver.records[request].finish_reason == "stop"

    def test_a_stop_token_as_the_last_allowed_one_is_a_stop(self) -> None:
        tokens, _ = outputs_alone(prompt(6, 1), SamplingParams(), 1)
        driver = Driver(config())
        request = driver.add(prompt(6, 1), 1, SamplingParams(stop_token_ids=frozenset(tokens)))
        driver.run()
        assert driver.records[request].finish_reason == "stop"

    @pytest.mark.parametrize("ended_by", ["length", "stop", "abort", "abort in flight"])
    def test_what_follows_on_an_ended_request_is_right(self, ended_by: str) -> None:
        """The newest token of a request has no K and V: a block that holds it must not be shared."""
        tokens, _ = outputs_alone(prompt(11, 1), SamplingParams(), 24)
        for length in range(1, 24):
            driver = Driver(config(block_size=4))
            stop = {tokens[length - 1]} - set(tokens[: length - 1]) if ended_by == "stop" else set()
            params = SamplingParams(stop_token_ids=frozenset(stop))
            request = driver.add(prompt(11, 1), length if ended_by == "length" else 24, params)
            while request.num_outputs < length and driver.scheduler.has_work:
                driver.step()
            if ended_by == "abort":
                driver.abort(request)
            elif ended_by == "abort in flight" and length < 24:
                driver.step(during=lambda driver=driver, request=request: driver.abort(request))
            for more in range(length + 1):
                driver.add([*prompt(11, 1), *tokens[:more]], 3)
            driver.run()
            driver.check_outputs()


class TestScores:
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("scored_tokens", [1, 3, 8, 256])
    def test_each_position_is_scored_once(self, scored_tokens: int, caching: bool) -> None:
        driver = Driver(config(max_scored_tokens=scored_tokens, prefix_caching=caching))
        same = prompt(21, 1)
        driver.add(same, 4)
        driver.run()
        for top in (0, 3, None):
            driver.add(same, 4, prompt_logprobs=top)
        driver.add(prompt(1, 2), 4, prompt_logprobs=0)
        driver.add(prompt(9, 3), 0, prompt_logprobs=0)
        driver.run()
        driver.check_outputs()  # compares the scores, one by one
        assert [len(record.scores) for record in driver.records.values()] == [0, 20, 20, 0, 0, 8]

    def test_a_preempted_prompt_goes_on_scoring_where_it_was(self) -> None:
        for steps in range(1, 8):
            driver = Driver(config(max_scored_tokens=4))
            request = driver.add(prompt(21, 1), 4, prompt_logprobs=0)
            for _ in range(steps):
                driver.step()
            driver.scheduler.preempt(request)
            driver.run()
            driver.check_outputs()
            assert len(driver.records[request].scores) == 20

    def test_scoring_does_not_hold_up_the_decodes_beside_it(self) -> None:
        driver = Driver(config(max_scored_tokens=1))
        decode = driver.add(prompt(4, 1), 30)
        driver.step()
        scored = driver.add(prompt(12, 2), 1, prompt_logprobs=0)
        behind = driver.add(prompt(12, 3), 1)
        while driver.records[scored].finish_reason is None:
            before = decode.num_outputs
            driver.step()
            assert decode.num_outputs == before + 1
        assert driver.records[behind].last_step == 2, "there was budget for a prompt that is not scored"

    def test_a_scored_prompt_does_not_read_the_cache_and_fills_it(self) -> None:
        driver = Driver(config())
        same = prompt(16, 1)
        first = driver.add(same, 2, prompt_logprobs=0)
        driver.run()
        second, third = driver.add(same, 2, prompt_logprobs=0), driver.add(same, 2)
        driver.run()
        assert (first.num_cached, second.num_cached, third.num_cached) == (0, 0, 12)
        stats = driver.scheduler.stats()
        assert (stats.queried_tokens, stats.hit_tokens) == (16, 12), "a prompt that is not looked up counts as a miss"


class TestSharing:
    def test_the_second_request_finds_the_prefix_of_the_first(self) -> None:
        driver = Driver(config())
        shared = prompt(12, 1)
        driver.add(shared + prompt(5, 2), 4)
        driver.run()
        later = driver.add(shared + prompt(5, 3), 4)
        driver.step()
        assert later.num_cached == 12
        assert counts(driver) == [5]
        driver.run()
        driver.check_outputs()
        assert driver.scheduler.stats().hit_tokens == 12
        assert driver.scheduler.stats().queried_tokens == 34

    def test_outputs_are_found_too(self) -> None:
        driver = Driver(config())
        first = driver.add(prompt(6, 1), 9)
        driver.run()
        conversation = first.token_ids[: first.num_tokens].tolist()
        later = driver.add([*conversation, 1, 2], 3)
        driver.step()
        assert later.num_cached == 12, "14 of its 17 tokens were computed, in three full blocks"
        driver.run()
        driver.check_outputs()

    def test_salts_do_not_meet(self) -> None:
        driver = Driver(config())
        for salt in ("a", "b", "a"):
            driver.add(prompt(12, 1), 2, salt=salt)
            driver.run()
        assert [request.num_cached for request in driver.records] == [0, 0, 8]
        driver.check_outputs()

    @pytest.mark.parametrize("caching", [True, False])
    def test_siblings_share_the_prompt_of_their_leader(self, caching: bool) -> None:
        driver = Driver(config(num_blocks=100, prefix_caching=caching, max_num_batched_tokens=16))
        leader = driver.add(prompt(41, 1), 6, SamplingParams(seed=0))
        siblings = [driver.add(prompt(41, 1), 6, SamplingParams(seed=n), leader=leader) for n in range(1, 4)]
        driver.step()
        stats = driver.scheduler.stats()
        assert stats.waiting_by_reason["shared_prompt"] == (3 if caching else 0)
        driver.run()
        assert [request.num_cached for request in siblings] == [40 if caching else 0] * 3
        driver.check_outputs()
        driver.check_idle()

    @pytest.mark.parametrize("moment", ["waiting", "running", "in flight", "finished"])
    def test_siblings_go_on_without_their_leader(self, moment: str) -> None:
        driver = Driver(config(max_num_batched_tokens=12, max_num_seqs=4))
        leader = driver.add(prompt(21, 1), 0 if moment == "finished" else 6)
        siblings = [driver.add(prompt(21, 1), 6, SamplingParams(seed=n), leader=leader) for n in range(1, 4)]
        if moment == "waiting":
            driver.abort(leader)
        elif moment == "running":
            driver.step()
            driver.abort(leader)
        elif moment == "in flight":
            driver.step(during=lambda: driver.abort(leader))
        driver.run()
        assert all(driver.records[request].finish_reason == "length" for request in siblings)
        assert [request.num_cached for request in siblings[1:]] == [20, 20], "the next of them did not take the lead"
        driver.check_outputs()
        driver.check_idle()

    def test_when_one_leads_after_another_they_all_get_their_prompt(self) -> None:
        driver = Driver(config(max_num_batched_tokens=12, max_num_seqs=4))
        leader = driver.add(prompt(33, 1), 6)
        siblings = [driver.add(prompt(33, 1), 6, SamplingParams(seed=n), leader=leader) for n in range(1, 5)]
        for ended in (leader, *siblings[:2]):
            driver.step()
            driver.abort(ended)
        driver.run()
        assert siblings[3].num_cached == 32
        driver.check_outputs()
        driver.check_idle()

    def test_the_lead_is_passed_on_as_often_as_it_is_dropped(self) -> None:
        driver = Driver(config(max_num_batched_tokens=12))
        leader = driver.add(prompt(33, 1), 6)
        siblings = [driver.add(prompt(33, 1), 6, SamplingParams(seed=n), leader=leader) for n in range(1, 6)]
        for ended in (leader, siblings[1], siblings[0], siblings[2]):
            driver.abort(ended)
        driver.step()
        assert driver.scheduler.running == [siblings[3]]
        assert driver.scheduler.stats().waiting_by_reason["shared_prompt"] == 1
        driver.run()
        assert [request.num_cached for request in siblings[3:]] == [0, 32]
        assert not any(request.followers for request in (leader, *siblings)), "what is over keeps others in memory"
        driver.check_outputs()

    def test_a_scored_prompt_is_computed_once_for_siblings_without_scores(self) -> None:
        driver = Driver(config(max_scored_tokens=8))
        leader = driver.add(prompt(21, 1), 4, prompt_logprobs=2)
        siblings = [driver.add(prompt(21, 1), 4, SamplingParams(seed=n), leader=leader) for n in range(1, 4)]
        driver.run()
        assert [request.num_cached for request in (leader, *siblings)] == [0, 20, 20, 20]
        driver.check_outputs()

    def test_others_are_not_held_up_by_siblings_that_wait(self) -> None:
        driver = Driver(config(max_num_batched_tokens=12, max_num_seqs=4))
        leader = driver.add(prompt(40, 1), 2)
        sibling = driver.add(prompt(40, 1), 2, leader=leader)
        other = driver.add(prompt(5, 2), 2)
        driver.run()
        assert driver.finished == [leader, other, sibling]
        driver.check_outputs()

    @pytest.mark.parametrize("num_blocks", range(6, 20))
    def test_siblings_in_small_pools(self, num_blocks: int) -> None:
        driver = Driver(config(num_blocks=num_blocks))
        for family in range(3):
            leader = driver.add(prompt(13, family), 10, SamplingParams(seed=1))
            for seed in range(2, 5):
                driver.add(prompt(13, family), 10, SamplingParams(seed=seed), leader=leader)
        driver.run(max_steps=500)
        driver.check_outputs()
        driver.check_idle()


class TestReports:
    def reasons(self, driver: Driver) -> dict[str, int]:
        return {reason: count for reason, count in driver.scheduler.stats().waiting_by_reason.items() if count}

    def test_why_requests_wait(self) -> None:
        driver = Driver(config(max_num_seqs=2))
        for seed in range(5):
            driver.add(prompt(4, seed), 6)
        driver.step()
        assert self.reasons(driver) == {"slots": 3}

        driver = Driver(config(max_num_batched_tokens=12))
        for seed in range(5):
            driver.add(prompt(10, seed), 6)
        driver.step()
        assert self.reasons(driver) == {"token_budget": 3}

        driver = Driver(config(num_blocks=6))
        for seed in range(5):
            driver.add(prompt(10, seed), 6)
        driver.step()
        assert self.reasons(driver) == {"kv_blocks": 4}

        driver = Driver(config())
        leader = driver.add(prompt(10, 1), 6)
        driver.add(prompt(10, 1), 6, leader=leader)
        driver.step()
        driver.add(prompt(10, 1), 6, leader=leader)
        assert sum(self.reasons(driver).values()) == 2

    def test_a_preemption_waits_for_blocks(self) -> None:
        driver = Driver(config(num_blocks=8))
        driver.add(prompt(8, 1), 20)
        driver.add(prompt(8, 2), 20)
        while not driver.scheduler.stats().preemptions:
            driver.step()
        assert self.reasons(driver) == {"kv_blocks": 1}

    def test_blocks_that_slid_out_of_sight_are_counted(self) -> None:
        groups = (EVERYTHING, Visibility(window=5), Visibility(chunk=6))
        driver = Driver(config(groups=groups))
        request = driver.add(prompt(30), 20)
        driver.run()
        last = request.max_cached_tokens - 1  # the last query
        gone = [
            len({key // 4 for key in range(last)} - {key // 4 for key in range(g.first(last), last)}) for g in groups
        ]
        assert gone[0] == 0
        assert driver.scheduler.stats().evicted_by["sliding_window"] == sum(gone) > 0

    def test_each_request_is_admitted_once(self) -> None:
        driver = Driver(config(num_blocks=8))
        requests = [driver.add(prompt(8, seed), 20) for seed in range(4)]
        admitted: list[Request] = []
        while driver.scheduler.has_work:
            driver.step()
            admitted += driver.scheduler.admitted
        assert driver.scheduler.stats().preemptions > 0
        assert admitted == requests

    def test_a_plan_must_be_committed_before_the_next(self) -> None:
        driver = Driver(config())
        driver.add(prompt(4), 4)
        assert driver.scheduler.plan() is not None
        with pytest.raises(RuntimeError, match="committed"):
            driver.scheduler.plan()

    def test_the_same_calls_lead_to_the_same_plans(self) -> None:
        def slots() -> list[list[int]]:
            driver = Driver(config(num_blocks=12))
            for seed in range(8):
                driver.add(prompt(9, seed % 3), 12)
            seen = []
            while driver.scheduler.has_work:
                driver.step()
                assert driver.plan is not None
                seen.append(driver.plan.slots[0].tolist())
            return seen

        assert slots() == slots()

    @pytest.mark.parametrize("spoil", ["leak", "order", "status", "computed"])
    def test_the_integrity_check_finds_what_is_spoiled(self, spoil: str) -> None:
        driver = Driver(config())
        first, second = (driver.add(prompt(5, seed), 9) for seed in range(2))
        driver.step()
        spoilers: dict[str, Callable[[], object]] = {
            "leak": lambda: first.tables[0].drop_from(1),
            "order": lambda: driver.scheduler.running.reverse(),
            "status": lambda: setattr(second, "status", Status.FINISHED),
            "computed": lambda: setattr(second, "num_computed", 99),
        }
        spoilers[spoil]()
        with pytest.raises(AssertionError):
            driver.scheduler.check_integrity()
