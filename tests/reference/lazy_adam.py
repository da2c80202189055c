"""`bx.lazy_adam` of a table with one number per row, row by row and step by step in float64 NumPy.

`Table.move` has the form that `algorithms.bsvrb_v2` and `ma_soba` take as `move`. Nothing is in closed form:
a row that rested is caught up by a loop over the steps that it missed.
"""

from types import SimpleNamespace

import numpy as np


class Table:
    """The rows of a table that is all of x, each as it was when it was last touched."""

    def __init__(self, looked_up, *, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, window=None):
        self.looked_up = looked_up  # of a sample
        self.b1, self.b2, self.eps, self.weight_decay, self.window = b1, b2, eps, weight_decay, window
        self.rows, self.rates, self.keeps = None, [], []

    def move(self, t, k, sample, now, new):
        """x after step t, and the x before it that the next step sees."""
        if self.rows is None:
            start = zip(now.x, now.z, strict=True)
            self.rows = [SimpleNamespace(s=0, x=x, z=z, m=0.0, v=0.0, mean=x, before=x) for x, z in start]
        t = len(self.rates)  # in a later stage of a restart, too
        due = t % len(self.rows)  # in turn, a row of a small table is touched whether it is looked up or not
        for j in {due, *self.looked_up(sample)}:
            row = self.caught_up(self.rows[j], t)
            rate, divisor = self.rate(k.eta, t), self.eps * np.sqrt(1 - self.b2 ** (t + 1))
            m = self.b1 * row.m + (1 - self.b1) * new.z[j]
            v = self.b2 * row.v + (1 - self.b2) * new.z[j] ** 2
            x = (1 - k.eta * self.weight_decay) * row.x - rate * m / (np.sqrt(v) + divisor)
            mean = row.mean + self.share(t) * (row.x - row.mean)
            self.rows[j] = SimpleNamespace(s=t + 1, x=x, z=new.z[j], m=m, v=v, mean=mean, before=row.x)
        self.rates.append(k.eta)
        self.keeps.append(1 - k.beta)
        found = [self.caught_up(row, t + 1) for row in self.rows]
        if self.window is not None:
            new.average = np.array([row.mean for row in found])
        return np.array([row.x for row in found]), np.array([row.before for row in found])

    def caught_up(self, row, t):
        """A row as it is at step t, if nothing touched it since `row.s`."""
        if row.s == t:
            return row
        z, slopes = row.z, []
        for keep in self.keeps[row.s : t]:
            z = keep * z
            slopes.append(z)
        total = row.v + (1 - self.b2) * np.sum(np.square(slopes))
        divisor = np.sqrt(total) + self.eps * np.sqrt(1 - self.b2**t)
        new = SimpleNamespace(**vars(row))
        for k in range(row.s, t):
            new.z = slopes[k - row.s]
            new.m = self.b1 * new.m + (1 - self.b1) * new.z
            new.v = self.b2 * new.v + (1 - self.b2) * new.z**2
            new.mean = new.mean + self.share(k) * (new.x - new.mean)
            new.before, eta = new.x, self.rates[k]
            new.x = (1 - eta * self.weight_decay) * new.x - self.rate(eta, k) * new.m / divisor
        new.s = t
        return new

    def rate(self, eta, t):
        return eta * np.sqrt(1 - self.b2 ** (t + 1)) / (1 - self.b1 ** (t + 1))

    def share(self, t):
        return max(1 / (self.window or np.inf), 1 / (1 + 0.1 * t))
