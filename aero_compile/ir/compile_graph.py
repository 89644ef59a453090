"""A graph as a Python function."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from torch import fx


def compile_graph(graph: fx.Graph) -> Callable[..., tuple[Any, ...]]:
    """Turn the graph into a Python function of (module, *inputs), as GraphModule does, visible in tracebacks."""
    source = graph.python_code(root_module="self")
    filename = f"<aero_compile graph {id(graph)}>"
    namespace: dict[str, Any] = dict(source.globals)
    exec(compile(source.src, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source.src), None, source.src.splitlines(keepends=True), filename)
    function: Callable[..., tuple[Any, ...]] = namespace["forward"]
    return function
