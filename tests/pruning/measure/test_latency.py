"""Latency ratios on a simulated clock that calls advance: the measured ratio is the simulated one."""

import gc
import math
import random

import pytest
import torch
from scipy import stats
from torch import nn

from pruning.measure.latency import calling, compare_latency


class World:
    """Simulated clock, and functions that advance it: by a mean, a random factor per build, and noise per call."""

    def __init__(self, seed: int = 0, *, places: float = 0.0, noise: float = 0.0) -> None:
        self.now, self.made, self.called = 0.0, [], []
        self._random, self._places, self._noise = random.Random(seed), places, noise

    def clock(self) -> float:
        return self.now

    def thing(self, name: str, seconds: float):
        def make():
            self.made.append(name)
            mean = seconds * math.exp(self._random.gauss(0, self._places))

            def call() -> None:
                self.called.append(name)
                self.now += mean * math.exp(self._random.gauss(0, self._noise))

            return call

        return make


def test_the_ratio_is_how_many_times_as_long_the_first_takes():
    world = World()

    found = compare_latency(world.thing("a", 0.003), world.thing("b", 0.001), clock=world.clock, seconds=0.1)

    assert found.ratio == pytest.approx(3.0)
    assert found.log_ratios == pytest.approx([math.log(3.0)] * 16)
    assert (found.a, found.b) == pytest.approx((0.003, 0.001))


def test_each_block_makes_both_anew_in_alternating_order_and_times_them_in_turns():
    world = World()

    found = compare_latency(
        world.thing("a", 1.0), world.thing("b", 1.0), blocks=4, warmup=1, seconds=1e-6, clock=world.clock
    )

    assert world.made == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert world.called == ["a", "b", *"abbaabba"] * 4
    assert (found.pairs, len(found.log_ratios)) == (16, 4)


def test_a_measurement_takes_the_time_that_it_is_given():
    world = World()

    compare_latency(world.thing("a", 0.001), world.thing("b", 0.001), seconds=2.0, clock=world.clock)

    assert world.now == pytest.approx(2.0, rel=0.05)


def test_the_t_interval_over_blocks_covers_the_truth_where_one_over_pairs_does_not():
    covered, narrow, count = 0, 0, 400
    quantile = stats.t.ppf(0.975, 15)
    for seed in range(count):
        world = World(seed, places=0.004, noise=0.02)
        blocks = compare_latency(
            world.thing("a", 0.001), world.thing("b", 0.001 / 1.3), seconds=0.08, warmup=0, clock=world.clock
        )
        half = quantile * stats.sem(blocks.log_ratios)
        covered += abs(math.log(blocks.ratio) - math.log(1.3)) <= half
        once = World(seed, places=0.004, noise=0.02)  # built only once: all blocks share the factor
        a, b = once.thing("a", 0.001)(), once.thing("b", 0.001 / 1.3)()
        fixed = compare_latency(lambda a=a: a, lambda b=b: b, seconds=0.08, warmup=0, clock=once.clock)
        narrow += abs(math.log(fixed.ratio) - math.log(1.3)) <= quantile * stats.sem(fixed.log_ratios)

    assert 0.93 <= covered / count <= 0.975
    assert narrow / count < 0.85


def test_threads_are_pinned_meanwhile_and_garbage_is_collected_again():
    before, seen = torch.get_num_threads(), []

    def make():
        return lambda: seen.append((torch.get_num_threads(), gc.isenabled()))

    found = compare_latency(make, make, blocks=2, warmup=0, seconds=1e-6, threads=before + 1)

    assert set(seen) == {(before + 1, False)}
    assert found.threads == before + 1
    assert torch.get_num_threads() == before
    assert gc.isenabled()


def test_a_network_is_called_as_it_is_in_use():
    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.seen = []

        def forward(self, x, scale=1.0):
            result = self.weight * x * scale
            self.seen.append((self.training, result.requires_grad, float(result)))

        def __deepcopy__(self, memo):
            copy = Noted()
            copy.seen = self.seen
            return copy

    model = Noted()
    for example in (torch.ones(1), (torch.ones(1), 2.0), {"x": torch.ones(1), "scale": 3.0}):
        calling(model, example)()()

    assert model.seen == [(False, False, 1.0), (False, False, 2.0), (False, False, 3.0)]
    assert model.training


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match=r"`blocks` \(=1\) must be at least 2"):
        compare_latency(int, int, blocks=1)
    with pytest.raises(ValueError, match=r"`seconds` \(=0\) must be above 0"):
        compare_latency(int, int, seconds=0)
    with pytest.raises(ValueError, match=r"`threads` \(=0\) must be at least 1"):
        compare_latency(int, int, threads=0)
    with pytest.raises(TypeError, match=r"`make_b` \(a Linear\) must be a function .* pass calling"):
        compare_latency(int, nn.Linear(1, 1))
