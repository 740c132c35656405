"""The cost of a run's processes over time, by site and process. Pure: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Mapping

Prices = Mapping[tuple[str, str], float]
"""USD per hour of each process that has a price, by (site, process)."""
Costs = dict[str, dict[str, float]]
"""USD by site and process."""
LINK = "link"
"""Stands in `Costs` for what the link between the trainer's site and a site carried."""
MOST_NAMED = 100
"""Most processes and links of a run that a row of metrics names: every step writes them all, and readers hold them."""


def few_names(costs: Costs, most: int = MOST_NAMED) -> Costs:
    """Return costs with the instances of each pool in one sum, as 'SITE-POOL', if they name more than `most`."""
    if sum(map(len, costs.values())) <= most:
        return costs
    sums: Costs = {}
    for site, processes in costs.items():
        of_site = sums.setdefault(site, {})
        for name, usd in processes.items():
            pool, _, index = name.rpartition("-")
            whose = pool if pool.startswith(f"{site}-") and index.isdecimal() else name  # see `instance_name`
            of_site[whose] = of_site.get(whose, 0.0) + usd
    return sums


class Spending:
    """Prices per hour that change as instances come and go."""

    def __init__(self, prices: Prices) -> None:
        """Begin with `prices`, valid for all times up to the first change.

        All times are in seconds of one clock that no one sets: a clock that is set would change what is spent.
        """
        self._changes = [(float("-inf"), dict(prices))]
        self._counted: float | None = None
        """Time up to which steps have been counted; None: there was none yet."""

    @property
    def usd_per_hour(self) -> float:
        """The current price per hour of all processes together."""
        return sum(self._changes[-1][1].values())

    def change(self, now: float, prices: Prices) -> None:
        """Set the prices from `now` on."""
        if prices != self._changes[-1][1]:
            self._changes.append((now, dict(prices)))

    def between(self, start: float, end: float) -> Costs:
        """Return the USD spent between two times, neither before the last `of_step`; what cost nothing is left out."""
        ends = [then for then, _ in self._changes[1:]] + [float("inf")]
        costs: Costs = {}
        for (since, prices), until in zip(self._changes, ends, strict=True):
            hours = max(0.0, min(end, until) - max(start, since)) / 3600
            for (site, process), price in prices.items() if hours else ():
                if price:
                    of_site = costs.setdefault(site, {})
                    of_site[process] = of_site.get(process, 0.0) + price * hours
        return costs

    def of_step(self, began: float, now: float) -> Costs:
        """Return the USD spent on the step that ends now: since the last one, on the first one since it `began`."""
        start, self._counted = began if self._counted is None else self._counted, now
        costs = self.between(start, now)
        while len(self._changes) > 1 and self._changes[1][0] <= now:  # no later step asks for them
            del self._changes[0]
        return costs
