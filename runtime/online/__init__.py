"""Steps of the online phase that the parties compute on their secret shares by themselves, without SPU.

`interpreter.py` runs the compiled code of a step on shares; `plan.py` says which code it can run, and what a run takes
of the offline phase. `hosts/computation.py` uses both. Start with `plan.py`.
"""
