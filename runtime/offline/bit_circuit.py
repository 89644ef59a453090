"""Circuits of XOR and AND on shared bits, as PPHLO text that SPU runs in its second runtime."""

from __future__ import annotations


class BitCircuit:
    """A circuit on rows of `size` bits: its inputs are the rows of one array, its outputs those of another.

    A wire is the name of a row.
    """

    def __init__(self, inputs: int, size: int) -> None:
        self._size, self._lines = size, list[str]()
        self._inputs, self.gates = inputs, 0
        self.inputs = [
            self._add(f"slice %arg0 [{at}:1:{at + 1}, 0:1:{size}] : ({self._type(inputs)}) -> {self._type(1)}")
            for at in range(inputs)
        ]

    def xor(self, left: str, right: str) -> str:
        """Add a gate; no message."""
        return self._add(f"xor {left}, {right} : {self._type(1)}")

    def both(self, left: str, right: str) -> str:
        """Add an AND gate."""
        self.gates += 1
        return self._add(f"and {left}, {right} : {self._type(1)}")

    def code(self, outputs: list[str], version: str) -> str:
        """Return the text of an executable that gives these wires, in order."""
        types = ", ".join([self._type(1)] * len(outputs))
        result = self._type(len(outputs))
        joined = f"%{len(self._lines)}"
        last = f"{joined} = pphlo.concatenate {', '.join(outputs)} dim = 0 : ({types}) -> {result}"
        lines = "\n".join(f"    {line}" for line in (*self._lines, last))
        return (
            f'module @bits attributes {{pphlo.version = "{version}"}} {{\n'
            f"  func.func @main(%arg0: {self._type(self._inputs)}) -> {result} {{\n{lines}\n"
            f"    return {joined} : {result}\n  }}\n}}\n"
        )

    def _add(self, operation: str) -> str:
        name = f"%{len(self._lines)}"
        self._lines.append(f"{name} = pphlo.{operation}")
        return name

    def _type(self, rows: int) -> str:
        return f"tensor<{rows}x{self._size}x!pphlo.secret<i1>>"
