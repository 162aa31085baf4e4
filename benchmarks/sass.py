"""Reads a compiled kernel: registers, spills, and how many instructions its usual path executes.

The machine code of a kernel is split into basic blocks and loops. A block is cold if most of its instructions come
from a function that is said to be cold, or from what that calls. A block is cold, too, if every way from the start to
the end that passes it also passes a cold one. What is left is the usual path. The caller says how often a loop executes
its blocks; the functions that its instructions come from tell which loop is which.

Debug information of machine code keeps the line of an instruction, but not the calls that led there. Triton's PTX has
them in comments. The PTX is therefore assembled once more, with the number of a whole chain of calls for a line.
"""

import ast
import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PLACE = re.compile(r'\s*//## File ".*", line (\d+)')
LOCATION = re.compile(r"\.loc\t\d+ \d+ \d+\s*// (.*)")
FRAME = re.compile(r"(\w+\.py):(\d+):\d+")
SOURCE = re.compile(r'\.file\t\d+ "(.*)"')
LABEL = re.compile(r"^(\.L_x_\d+|\$[\w$]+):")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-9T]+)\s+)?(.*?)\s*;")
TARGET = re.compile(r"`\((\.L_x_\d+|\$[\w$]+)\)")
ENDS = ("BRA", "EXIT", "RET", "BRX", "CALL")
DOUBLE = ("DFMA", "DADD", "DMUL", "DSETP", "DMNMX")
CONTROL = ("BRA", "BSSY", "BSYNC", "EXIT", "RET", "BREAK", "WARPSYNC", "NOP")
UNITS = {"MUFU": "special", "SHFL": "shuffle", "LDG": "memory", "STG": "memory", "LDL": "spill", "STL": "spill"}


class Instruction(NamedTuple):
    """One machine instruction.

    Attributes:
        name: Its opcode with modifiers, as "MUFU.EX2".
        conditional: Whether it has a predicate.
        target: The label that it jumps to.
        chain: "file.function" of the source that it comes from, and of those that call it.
    """

    name: str
    conditional: bool
    target: str | None
    chain: frozenset[str]

    @property
    def unit(self) -> str:
        """What executes it."""
        kind = self.name.split(".")[0]
        if kind in DOUBLE or self.name.startswith(("MUFU.RCP64", "MUFU.RSQ64")):
            return "float64"
        return "control" if kind in CONTROL else UNITS.get(kind, "other")


class Block(NamedTuple):
    """Instructions that are executed together, and the numbers of the blocks that may follow."""

    instructions: list[Instruction]
    followers: list[int]

    def comes_from(self, places: Collection[str]) -> bool:
        """Whether most of its instructions come from one of these functions: some may have been moved here."""
        own = [not v.chain.isdisjoint(places) for v in self.instructions if not v.name.startswith("BSYNC")]
        return 2 * sum(own) > len(own)


class Resources(NamedTuple):
    """Registers of a thread, and bytes of stack or spilled registers."""

    registers: int
    spills: int


def resources(kernel: Any) -> Resources:
    """Of a kernel that Triton has compiled."""
    text = _run("cuobjdump", ["--dump-resource-usage"], kernel.asm["cubin"])
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"])


def _run(tool: str, options: list[str], content: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True).stdout


@functools.cache
def _functions(path: str) -> list[tuple[int, int, str]]:
    """First and last line and name of each function of a source file."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [(node.lineno, node.end_lineno or node.lineno, node.name) for node in found]


def _place(path: str, line: int) -> str:
    names = [name for first, last, name in _functions(path) if first <= line <= last]
    return f"{Path(path).stem}.{names[-1] if names else ''}"


def _with_chains(ptx: str) -> tuple[str, list[frozenset[str]]]:
    """PTX whose line numbers are those of chains of calls, and these."""
    paths = {Path(path).name: path for path in SOURCE.findall(ptx)}
    chains: list[frozenset[str]] = [frozenset()]
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        if found[1] not in numbers:
            numbers[found[1]] = len(chains)
            frames = FRAME.findall(found[1])
            chains.append(frozenset(_place(paths[name], int(line)) for name, line in frames if name in paths))
        return f".loc\t1 {numbers[found[1]]} 0"

    return LOCATION.sub(number, ptx), chains


def blocks_of(kernel: Any) -> list[Block]:
    """The basic blocks of a kernel in the order of their addresses."""
    ptx, chains = _with_chains(kernel.asm["ptx"])
    arch = re.search(r"\.target (sm_\w+)", ptx)
    assert arch is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        _run("ptxas", ["-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={arch[1]}", "-o", cubin.name], ptx.encode())
        code = _run("nvdisasm", ["-gi", "-c"], Path(cubin.name).read_bytes())
    groups: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    chain: frozenset[str] = frozenset()
    for line in code.splitlines():
        if found := PLACE.match(line):
            chain = chains[int(found[1])] if int(found[1]) < len(chains) else frozenset()
        elif found := LABEL.match(line):
            if groups[-1]:
                groups.append([])
            labels[found[1]] = len(groups) - 1
        elif found := INSTRUCTION.match(line):
            _, predicate, body = found.groups()
            target = TARGET.search(body)
            groups[-1].append(Instruction(body.split()[0], predicate is not None, target and target[1], chain))
            if body.startswith(ENDS):
                groups.append([])
    if not groups[-1]:
        groups.pop()
    return [Block(group, _followers(i, group, labels, len(groups))) for i, group in enumerate(groups)]


def _followers(i: int, group: list[Instruction], labels: dict[str, int], count: int) -> list[int]:
    last = group[-1]
    following = [i + 1] if i + 1 < count else []
    if last.name.startswith(("EXIT", "RET")):
        return following if last.conditional else []
    if last.name.startswith("BRA") and last.target in labels:
        falls_through = last.conditional or last.name.startswith("BRA.DIV") or "UP" in last.name
        return [labels[last.target], *(following if falls_through else [])]
    return following


def hot_blocks(blocks: list[Block], cold: Collection[str]) -> set[int]:
    """Blocks on ways from the first one to an exit that pass no cold one."""
    open_ = [
        not block.comes_from(cold) and not any(v.name.startswith("ENDCOLLECTIVE") for v in block.instructions)
        for block in blocks
    ]
    exits = [i for i, block in enumerate(blocks) if block.instructions[-1].name.startswith("EXIT")]
    backward: list[list[int]] = [[] for _ in blocks]
    for i, block in enumerate(blocks):
        for follower in block.followers:
            backward[follower].append(i)
    return _reached([0], [block.followers for block in blocks], open_) & _reached(exits, backward, open_)


def _reached(starts: list[int], edges: list[list[int]], is_open: list[bool]) -> set[int]:
    found, left = set(), [i for i in starts if is_open[i]]
    while left:
        i = left.pop()
        if i not in found:
            found.add(i)
            left += [j for j in edges[i] if is_open[j]]
    return found


def loops_of(blocks: list[Block], hot: set[int]) -> list[set[int]]:
    """The blocks of each natural loop: those from which a jump back to its head can be reached without the head."""
    edges = [[j for j in block.followers if j in hot] if i in hot else [] for i, block in enumerate(blocks)]
    backward: list[list[int]] = [[i for i in hot if j in edges[i]] for j in range(len(blocks))]
    loops: dict[int, set[int]] = {}
    for head in hot:
        without = [i in hot and i != head for i in range(len(blocks))]
        free = _reached([0], edges, without)  # blocks that the head does not dominate
        ends = [i for i in backward[head] if i not in free]
        if ends:
            loops[head] = {head} | _reached(ends, backward, without)
    return list(loops.values())


class Counts(NamedTuple):
    """Instructions of a warp, by the unit that executes them: before the search, of one of its steps, and after it."""

    prologue: Counter[str]
    step: Counter[str]
    epilogue: Counter[str]

    def total(self, steps: float) -> Counter[str]:
        return Counter({u: self.prologue[u] + steps * self.step[u] + self.epilogue[u] for u in set().union(*self)})


def count(blocks: list[Block], cold: Collection[str], search: Collection[str], tiles: Callable[[], int]) -> Counts:
    """Counts the usual path.

    Args:
        blocks: Of the kernel.
        cold: Functions that are not on it.
        search: Functions whose loop is the search; every other loop goes over tiles.
        tiles: Number of tiles of a row.
    """
    hot = hot_blocks(blocks, cold)
    loops = loops_of(blocks, hot)
    own = [loop.difference(*(other for other in loops if other < loop)) for loop in loops]
    steps = [
        loop
        for loop, mine in zip(loops, own, strict=True)
        if any(not v.chain.isdisjoint(search) for i in mine for v in blocks[i].instructions)
    ]
    step: set[int] = set().union(*steps)
    after = _reached(sorted(step), [block.followers for block in blocks], [i in hot for i in range(len(blocks))]) - step
    counts = Counts(Counter(), Counter(), Counter())
    for i in hot:
        times = tiles() ** sum(i in loop and loop not in steps for loop in loops)
        part = counts.step if i in step else counts.epilogue if i in after else counts.prologue
        for instruction in blocks[i].instructions:
            if not instruction.name.startswith("NOP"):
                part[instruction.unit] += times
                part["all"] += times
    return counts
