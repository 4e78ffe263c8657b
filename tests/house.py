"""
Count the lines of each package and the imports between packages: `python -m tests.house`.

It prints lines as `wc -l` counts them; rooms (a folder, a module outside of folders, or a tool of the workbench);
floors (the longest chain of rooms that import each other); arrows (pairs of rooms with an import, also a lazy one);
and arrows in circles.
"""

from collections import Counter

from tests.test_layers import PACKAGE, imports


def room_of(parts):
    """Return the room of a file: `("ppo", "trainer")` is in `ppo`, and a tool of the workbench is one."""
    return "/".join(parts[:2]) if parts[0] == "workbench" and len(parts) > 2 else parts[0]


def files():
    """Return each file by its parts: `ppo/trainer.py` is `("ppo", "trainer")`."""
    found = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    doors = (("__init__",), ("__main__",), ("workbench", "__init__"))  # their imports are lazy
    return {parts: path for parts, path in found.items() if parts not in doors}


def arrows():
    """Return the pairs of rooms between which something is imported."""
    rooms = {room_of(parts) for parts in files()}
    found = {
        (room_of(parts), room_of(name.split(".")[1:]))
        for parts, path in files().items()
        for name in imports(path)
        if name.startswith("trl_ext.")
    }
    return {(here, there) for here, there in found if here != there and there in rooms}


def reached(pairs):
    """Return the rooms that each room reaches over any number of arrows."""
    after = {here: {there for start, there in pairs if start == here} for here, _ in pairs}
    while True:
        more = {here: there.union(*(after.get(room, set()) for room in there)) for here, there in after.items()}
        if more == after:
            return after
        after = more


def floors(pairs, after):
    """Return the length of the longest chain of rooms; each room of a circle counts."""
    height = {}
    for room in sorted({room for pair in pairs for room in pair}, key=lambda room: len(after.get(room, ()))):
        below = [there for here, there in pairs if here == room and room not in after.get(there, ())]
        height[room] = 1 + max((height[there] for there in below), default=0)
    return max(height.values())


def main():
    lines = Counter()
    for parts, path in files().items():
        lines[room_of(parts)] += len(path.read_text().splitlines())
    for path in PACKAGE.rglob("*.j2"):  # a page's template counts as code
        lines[room_of(path.relative_to(PACKAGE).with_suffix("").parts)] += len(path.read_text().splitlines())
    for room, count in sorted(lines.items()):
        print(f"{count:6,} {room}")
    groups = {name: sum(n for room, n in lines.items() if room.startswith(name)) for name in ("workbench", "cli")}
    pairs = arrows()
    after = reached(pairs)
    circles = [pair for pair in pairs if pair[0] in after.get(pair[1], ())]
    print(f"{sum(lines.values()):6,} lines: layer {sum(lines.values()) - sum(groups.values()):,}", end="")
    print("".join(f", {name} {count:,}" for name, count in groups.items()))
    print(f"{len(lines)} rooms, {floors(pairs, after)} floors, {len(pairs)} arrows, {len(circles)} in circles")


if __name__ == "__main__":
    main()
