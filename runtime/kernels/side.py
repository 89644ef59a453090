"""What a kernel has of the party that it runs at: its rank, and a second runtime of SPU, in the 32-bit ring."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.kernels.words import Words, read_words, with_words


class Side:
    """One party's side of the kernels of a run.

    `link`: to the other party. Both spawn from it at the same place of the program, so that theirs meet. `config`: of
    the second runtime (`small_config`). `executions`: how many it has run.
    """

    def __init__(self, spu: Any, link: Any, rank: int, config: Any) -> None:
        self.spu, self.link, self.rank = spu, link, rank
        self._config = config
        self._runtime: Any = None
        self.executions = 0

    def run_small(self, code: str, words: Words) -> Words:
        """Run `code` of one argument and one result in the 32-bit ring.

        `words` are an additive share of integers, uint64 [n], of which the lower 32 bits count; returns those of the
        result, uint64 [n].
        """
        spu, runtime = self.spu, self._small()
        (form, _) = spu.Io(2, self._config).make_shares(np.zeros(words.size, np.int32), spu.Visibility.VIS_SECRET)
        runtime.set_var("in", with_words(form, words, 32))
        runtime.run(spu.Executable("kernel", ["in"], ["out"], code.encode()))
        self.executions += 1
        found = read_words(runtime.get_var("out"), 32, bits=True)
        for name in ("in", "out"):
            runtime.del_var(name)
        return found

    def _small(self) -> Any:
        """The second runtime, made when it is first needed (not by cached_property, whose lock both threads of one
        process would share)."""
        if self._runtime is None:
            self._runtime = self.spu.Runtime(self.link.spawn(), self._config)
        return self._runtime
