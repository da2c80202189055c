"""What exact steps at the end of a run have done, and what there is to be doubted after them."""

from __future__ import annotations

import dataclasses

_STEEP = 0.1  # ‖∇F‖, as a share of the largest one, above which x is no stationary point
_FLAT = 0.003  # the same, below which little is left of F where a search on a sample is cut
BEYOND = 10.0  # times as far from x0: F is looked at there


@dataclasses.dataclass(frozen=True)
class Finish:
    """What exact steps at the end of a run have done.

    Attributes:
      evaluations: how often all blocks, or all of a sample, were solved on all their rows, for F and ∇F.
      before: F where the run had ended; where it had begun, if F has no value at the end. After a search on a
        sample of the blocks it is the mean over other blocks; likewise `after`.
      after: F at the x that is returned; `before` if nothing less was found.
      slope: ‖∇F‖ at the x that is returned, as a share of the largest one where the run began and ended, and
        where exact steps have come down; entries of x are measured in units of their own. 1 if all are zero.
        At a kink of a risk, that of a smooth one near by.
      falling: the share of the decrease of F that came last, if F still fell fast when the search was cut;
        else 0.
      is_endless: whether F goes on falling far beyond the x that is returned.
      was_cut: whether the search for less was ended while it still found less.
      is_flat: whether F hardly depends on some entries of x there, and there was no time to try others.
      judges: how many blocks beside the sample were solved to compare both x; 0 if all blocks were searched.
    """

    evaluations: int
    before: float
    after: float
    slope: float
    falling: float
    is_endless: bool = False
    was_cut: bool = False
    is_flat: bool = False
    judges: int = 0

    def __str__(self) -> str:
        sample, judges = (" of a sample", f" on {self.judges} other blocks") if self.judges else ("", "")
        change = f"F from {self.before:.4g} to {self.after:.4g}"
        known = ((self.was_cut, ", cut"), (self.is_endless, ", F falls on"), (self.is_flat, ", F is flat"))
        notes = "".join(note for holds, note in known if holds)
        slope = f"‖∇F‖ is {self.slope:.2g} times its largest value{notes}"
        return f"{self.evaluations} exact evaluations{sample} took {change}{judges} ({slope})"

    @property
    def is_steep(self) -> bool:
        """Whether F is still steep where nothing less was found."""
        return self.slope > _STEEP

    def doubt(self, steps: int) -> str:
        """What to say if x is still on its way after a run of some steps, or always will be; else nothing."""
        if self.is_endless:
            return (
                f"F falls on {BEYOND:.0f} times as far from x0 as exact steps have gone: it seems to have "
                "no minimum. Bound x (bx.bounded), or add a regulariser to f, such as 1e-3 ‖x‖²"
            )
        if self.was_cut and self.judges and self.slope > _FLAT and not self.falling:
            return (
                "x may still be on its way: the search on a sample of the blocks was cut while it still "
                f"found less: try steps={4 * steps} instead of {steps}, or standardise the data: units that "
                "differ by orders of magnitude make it long"
            )
        if self.falling or (self.was_cut and self.is_steep):
            what = (
                f"{self.falling:.0%} of the decrease of F came in the last part of"
                if self.falling
                else f"‖∇F‖ is still {self.slope:.2g} times its largest value after"
            )
            return (
                f"x is still on its way: {what} {self.evaluations} exact evaluations: "
                f"try steps={4 * steps} instead of {steps}"
            )
        if self.is_flat:
            return (
                "F hardly depends on some entries of x where the run has ended, and there was no time to "
                "look whether it is less elsewhere: try another x0, such as one nearer to zero, or "
                f"steps={4 * steps} instead of {steps}"
            )
        return ""
