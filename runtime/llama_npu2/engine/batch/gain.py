"""Decides how long a text's drafts are, and stops them where they cost more than what comes true of them."""

from __future__ import annotations

from llama_npu2.engine.batch.pace import Pace

LONGEST = 15
"""Most tokens of a draft: with the token before them, as many rows as products take in one pass over the weights."""
_FIRST, _LEAST = 4, 2
"""Tokens of the first draft, and of one after drafts that did not come true."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
"""For how many tokens nothing is drafted after drafts did not pay, twice as many each time."""
_WEIGHT = 0.3
"""Weight of the last draft in the average of what comes true."""
_HOPED = 0.5
"""Share of a draft that is thought to come true before any was tried."""
_LEAST_GAIN = 0.1
"""Tokens that a draft must bring more than it costs."""


class Gain:
    """What the drafts of one text by one drafter bring."""

    def __init__(self, pace: Pace) -> None:
        """Args: `pace` knows how long the steps take that check drafts."""
        self._pace = pace
        self.length = _FIRST
        """How long the next draft should be: longer after those that came true as a whole."""
        self._share = _HOPED
        """Average of the share of drafts that comes true."""
        self._until, self._pause = 0, _FIRST_PAUSE
        self._tries = True
        """Whether the next draft is made whatever it costs: texts and machines change."""

    def rests(self, tokens: int) -> bool:
        """Return whether nothing is drafted for a text of so many tokens, as drafts did not pay shortly before."""
        return tokens < self._until

    def allows(self, tokens: int, rows: int, drafted: int, seconds: float = 0.0) -> bool:
        """Return whether to make a draft; if not, drafts pause.

        Args:
            tokens: of the text so far.
            rows: that the step has without the draft.
            drafted: tokens of the draft.
            seconds: that making it takes.
        """
        pays = self._pays(rows, drafted, seconds)
        if not pays and not self._tries:
            self._until, self._pause = tokens + self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self._tries, self.length = True, _FIRST
            return False
        self._pause, self._tries = _FIRST_PAUSE if pays else self._pause, False
        return True

    def note(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft were chosen."""
        self._share += _WEIGHT * (accepted / drafted - self._share)
        self.length = min(self.length * 2, LONGEST) if accepted == drafted else max(accepted, _LEAST)

    def _pays(self, rows: int, drafted: int, seconds: float) -> bool:
        """Return whether a draft brings more tokens than all sequences of a step lose by its longer time."""
        alone, longer = self._pace.seconds(rows), self._pace.seconds(rows + drafted)
        lost = rows * ((longer + seconds) / alone - 1) if alone and longer else 0.0
        return self._share * drafted >= lost + _LEAST_GAIN
