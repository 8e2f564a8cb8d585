"""Generate ALFWorld games: `python -m g2po_envs.alfworld.games OUT --split train --num-games 100`.

Rooms are furnished at random from ALFRED's vocabulary, filled with objects, given one of the six task types and
written as the `game.tw-pddl` files that the official release consists of, for the domain and grammar that the alfworld
package ships. Before a game is written, the bundled planner finds a walkthrough, which is verified by playing it.

A *layout* is a kind of room and its furniture (which receptacles, how many of each). The split of a layout depends
only on its hash, so no layout of a held-out game is ever trained on, for any seeds and numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from g2po_envs.alfworld.manifest import GAME_FILE, TASK_TYPES, Manifest, game_id
from g2po_envs.alfworld.planning import Planners
from g2po_envs.alfworld.vocabulary import HOLDS, LAMP, OPENABLE, PROPERTIES, ROOMS, TOOLS
from g2po_trl.environments.pool.limits import usable_cores
from g2po_trl.utils.options import require

GENERATOR_VERSION = 2
# Share of all layouts that each split owns.
SPLITS = {"train": 0.7, "validation": 0.1, "held-out": 0.2}
_DESCRIPTION = "games.json"


@dataclass(frozen=True)
class Size:
    """Numbers of receptacles and objects of a room (inclusive), and the maximum number of receptacles of one type."""

    receptacles: tuple[int, int]
    objects: tuple[int, int]
    same: int


SIZES = {
    "tiny": Size((4, 5), (4, 7), 2),
    "small": Size((5, 8), (6, 12), 3),
    "long": Size((9, 12), (12, 18), 5),
    "medium": Size((9, 16), (12, 22), 6),
    "full": Size((20, 36), (25, 45), 16),
}


@dataclass(frozen=True)
class Room:
    """A furnished room and its task. `receptacles`: id -> type; `objects`: id -> (type, receptacle id)."""

    kind: str
    receptacles: dict[str, str]
    objects: dict[str, tuple[str, str]]
    task_type: str
    target: str
    place: str

    @property
    def layout(self) -> str:
        return layout_hash(self.receptacles.values())


def layout_hash(receptacle_types) -> str:
    """Return a hash of a room's furniture: the types and their numbers."""
    furniture = " ".join(f"{kind}:{number}" for kind, number in sorted(Counter(receptacle_types).items()))
    return hashlib.sha256(furniture.encode()).hexdigest()[:16]


def split_of_layout(layout: str) -> str:
    """Return the split that a layout belongs to."""
    at = int(layout, 16) / 16 ** len(layout)
    for split, share in SPLITS.items():
        if at < share:
            return split
        at -= share
    return split


def generate_games(
    directory: str | Path,
    split: str,
    num_games: int,
    seed: int = 0,
    size: str = "small",
    num_workers: int | None = None,
    progress: bool = True,
) -> Manifest:
    """Return `num_games` games in `directory`, the six task types in equal shares; generate them if necessary.

    The games depend only on `split`, `num_games`, `seed` and `size`; those of a smaller number are the first ones of a
    larger. The folder appears when it is complete. A folder of games made with other arguments is replaced; a folder
    with other files is an error.

    Returns:
        The games' manifest.
    """
    require(split in SPLITS, "split", split, f"choose one of {', '.join(SPLITS)}")
    require(size in SIZES, "size", size, f"choose one of {', '.join(SIZES)}")
    require(num_games >= 1, "num_games", num_games, "set it to at least 1")
    directory = Path(directory).expanduser().absolute()
    made_of = {"version": GENERATOR_VERSION, "split": split, "num_games": num_games, "seed": seed, "size": size}
    if _is_complete(directory, made_of):
        return Manifest.scan(directory)
    is_free = not directory.exists() or not any(directory.iterdir()) or (directory / _DESCRIPTION).exists()
    remedy = "it is not empty and not made by this generator, give another folder"
    require(is_free, "directory", str(directory), remedy)

    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        num_workers = min(num_games, num_workers or usable_cores())
        with Planners(num_workers) as planners:
            solved = _solved_games(planners, split, size, seed)
            numbers = range(num_games)
            if progress:
                from tqdm import tqdm

                numbers = tqdm(numbers, desc=f"{split} games", unit="game", leave=False)
            for number in numbers:
                _write(scratch, number, *next(solved))
        (scratch / _DESCRIPTION).write_text(json.dumps(made_of, indent=1) + "\n")
        scratch.chmod(0o755)
        _put_in_place(scratch, directory, made_of)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Manifest.scan(directory)


def report_games(directory: str | Path, num_games: int, seed: int = 0, size: str = "small") -> Manifest:
    """Return about `num_games` more held-out games, to report a choice that was made on the first `num_games`.

    They are made in DIRECTORY/held-out-<number>, together with the first ones.
    """
    first, both = (
        generate_games(Path(directory) / f"held-out-{number}", "held-out", number, seed=seed, size=size)
        for number in (num_games, 2 * num_games)
    )
    return both.without(first)


def _is_complete(directory: Path, made_of: dict) -> bool:
    try:
        same = json.loads((directory / _DESCRIPTION).read_text()) == made_of
    except (OSError, ValueError):
        return False
    return same and len(list(directory.glob(f"*/*/{GAME_FILE}"))) == made_of["num_games"]


def _put_in_place(scratch: Path, directory: Path, made_of: dict) -> None:
    for _ in range(2):
        try:
            scratch.rename(directory)  # fails where there are games
            return
        except OSError:
            if _is_complete(directory, made_of):  # another process was faster and reads its games, which are the same
                return
            shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)


def _solved_games(planners: Planners, split: str, size: str, seed: int) -> Iterator[tuple[Room, dict]]:
    """Yield distinct solvable games. Rooms are drawn here, so that their order does not depend on the planners."""
    rooms = {}

    def candidates() -> Iterator[dict]:
        number = 0
        while True:
            task_type = TASK_TYPES[number % len(TASK_TYPES)]
            room = draw_room(
                random.Random(f"{GENERATOR_VERSION}/{split}/{size}/{seed}/{number}"), split, size, task_type
            )
            game = room_to_game(room, random.Random(f"{seed}/{number}"))
            number += 1
            if (name := game_id(game)) not in rooms:
                rooms[name] = room
                yield game

    for game, walkthrough in planners.solve(candidates()):
        if walkthrough:
            yield rooms[game_id(game)], game | {"solvable": True, "walkthrough": walkthrough}


def draw_room(rng: random.Random, split: str, size: str, task_type: str) -> Room:
    """Return a random room of a split with a possible task that is not done yet."""
    while True:
        room = _draw(rng, SIZES[size], task_type)
        if room is not None and split_of_layout(room.layout) == split:
            return room


def _draw(rng: random.Random, size: Size, task_type: str) -> Room | None:
    """Return a random room; `None` if the task does not fit in it."""
    tool = TOOLS.get(task_type)
    lit = task_type == "look_at_obj_in_light"
    kinds = [
        kind
        for kind, furniture in ROOMS.items()
        if (tool is None or tool in furniture) and (not lit or kind in LAMP.rooms)
    ]
    kind = rng.choice(kinds)
    receptacles = _furnish(rng, kind, size, tool)
    types = sorted(set(receptacles.values()))
    at_hand = sorted({thing for furniture in types for thing in HOLDS[furniture]})
    pairs = _tasks(task_type, types, at_hand)
    if not pairs:
        return None
    # The object first, then its place: else what fits everywhere would be asked for most.
    target = rng.choice(sorted({thing for thing, _ in pairs}))
    place = rng.choice([where for thing, where in pairs if thing == target])

    things = [target] * (rng.choice((2, 2, 3)) if task_type == "pick_two_obj_and_place" else rng.choice((1, 1, 2)))
    others = [thing for thing in at_hand if thing != target]
    while len(things) < rng.randint(*size.objects) and others:
        things += [rng.choice(others)] * rng.choice((1, 1, 1, 2))
    objects = {}
    counts = Counter()
    for thing in things:
        spots = [
            spot
            for spot, furniture in receptacles.items()
            if thing in HOLDS[furniture] and not (thing == target and furniture in (place, tool))
        ]
        if thing == target and not spots:
            return None
        if spots:
            counts[thing] += 1
            objects[f"{thing}_bar_{counts[thing]:02}"] = (thing, rng.choice(spots))
    if lit:
        spots = [spot for spot, furniture in receptacles.items() if furniture in LAMP.spots]
        if not spots:
            return None
        objects[f"{LAMP.name}_bar_01"] = (LAMP.name, rng.choice(spots))
        place = LAMP.name
    return Room(kind, receptacles, objects, task_type, target, place)


def _furnish(rng: random.Random, kind: str, size: Size, tool: str | None) -> dict[str, str]:
    most = {furniture: min(number, size.same) for furniture, number in ROOMS[kind].items()}
    number = min(rng.randint(*size.receptacles), sum(most.values()))
    counts = Counter([tool] if tool else [])
    while sum(counts.values()) < number:
        free = sorted(furniture for furniture in most if counts[furniture] < most[furniture])
        # Cabinets and drawers come in rows: what there may be more of is drawn more often.
        counts[rng.choices(free, [most[furniture] for furniture in free])[0]] += 1
    return {_receptacle_id(f, i): f for f, n in sorted(counts.items()) for i in range(1, n + 1)}


def _receptacle_id(furniture: str, number: int) -> str:
    if furniture.endswith("Basin"):  # a part of something else, in the official ids
        return f"{furniture.removesuffix('Basin')}_bar_{number:02}_bar_{furniture}"
    return f"{furniture}_bar_{number:02}"


def _tasks(task_type: str, types: list[str], at_hand: list[str]) -> list[tuple[str, str]]:
    """Return (object, place) pairs where the place can hold the object, which can start elsewhere."""
    needed = {
        "pick_clean_then_place_in_recep": "cleanable",
        "pick_heat_then_place_in_recep": "heatable",
        "pick_cool_then_place_in_recep": "coolable",
    }.get(task_type)
    tool = TOOLS.get(task_type)
    pairs = []
    for thing in at_hand:
        if needed and thing not in PROPERTIES[needed]:
            continue
        homes = [furniture for furniture in types if thing in HOLDS[furniture] and furniture != tool]
        if task_type == "look_at_obj_in_light":
            pairs += [(thing, "")] if homes else []
        else:
            pairs += [(thing, place) for place in types if thing in HOLDS[place] and set(homes) - {place}]
    return pairs


def room_to_game(room: Room, rng: random.Random) -> dict:
    """Return the content of the room's game file, without a walkthrough."""
    from alfworld.gen.goal_library import gdict

    lamp = room.task_type == "look_at_obj_in_light"
    names = {"obj": room.target, "recep": "" if lamp else room.place, "toggle": room.place if lamp else ""}
    goal = gdict[room.task_type]
    task = rng.choice(goal["templates"]).format(**{slot: name.lower() for slot, name in names.items()})
    domain, grammar = _shipped()
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", task),
        # The library writes the goals with # for - and closes the problem's parenthesis.
        "pddl_problem": _problem(room) + goal["pddl"].format(**names).replace("#", "-"),
    }


@lru_cache(1)
def _shipped() -> tuple[str, str]:
    """Return PDDL domain and grammar of the installed alfworld package."""
    from importlib.resources import files

    data = files("alfworld") / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


def _problem(room: Room) -> str:
    """Return the PDDL problem up to its goal."""
    things = sorted({thing for thing, _ in room.objects.values()})
    # The domain's actions name these types: they must exist in every problem.
    furniture = sorted({*room.receptacles.values(), "SinkBasin", "Microwave", "Fridge"})
    kinds = sorted({*things, "Knife", "ButterKnife", room.target})
    spots = {receptacle: f"loc_bar_{i}" for i, receptacle in enumerate(room.receptacles, 1)}
    declared = [
        "agent1 - agent",
        *(f"{spot} - location" for spot in ("loc_bar_0", *spots.values())),
        *(f"{receptacle} - receptacle" for receptacle in room.receptacles),
        *(f"{thing} - object" for thing in room.objects),
        *(f"{name}Type - rtype" for name in furniture),
        *(f"{name}Type - otype" for name in kinds),
    ]
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_0)"]
    for receptacle, name in room.receptacles.items():
        facts += [
            f"(receptacleType {receptacle} {name}Type)",
            f"(receptacleAtLocation {receptacle} {spots[receptacle]})",
        ]
        facts += [f"(openable {receptacle})"] * (name in OPENABLE)
    for thing, (name, receptacle) in room.objects.items():
        facts += [
            f"(objectType {thing} {name}Type)",
            f"(inReceptacle {thing} {receptacle})",
            f"(objectAtLocation {thing} {spots[receptacle]})",
            f"({'toggleable' if name == LAMP.name else 'pickupable'} {thing})",
            *(f"({what} {thing})" for what, which in PROPERTIES.items() if name in which),
        ]
    for name in sorted(set(room.receptacles.values())):
        facts += [f"(canContain {name}Type {thing}Type)" for thing in things if thing in HOLDS[name]]
    lines = ["(define (problem generated)", "(:domain alfred)", "(:objects", *declared, ")", "(:init", *facts, ")"]
    return "\n".join(lines) + "\n"


def _write(directory: Path, number: int, room: Room, game: dict) -> None:
    """Write a game in the official folder layout: task, then trial."""
    lamp = room.task_type == "look_at_obj_in_light"
    folder = directory / f"{room.task_type}-{room.target}-None-{room.place}-{number}" / f"trial_{game_id(game)}"
    folder.mkdir(parents=True)
    (folder / GAME_FILE).write_text(json.dumps(game))
    described = {
        "task_type": room.task_type,
        "task_id": folder.name,
        "scene": {"room": room.kind, "layout": room.layout},
        "pddl_params": {
            "object_target": room.target,
            "parent_target": "" if lamp else room.place,
            "toggle_target": room.place if lamp else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
    }
    (folder / "traj_data.json").write_text(json.dumps(described))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m g2po_envs.alfworld.games", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="the folder to make")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--num-games", type=int, default=100)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=None, help="planner processes; default: one a core")
    args = parser.parse_args()
    manifest = generate_games(args.directory, args.split, args.num_games, args.seed, args.size, args.num_workers)
    print(f"{args.directory}: {manifest.summary()}")


if __name__ == "__main__":
    main()
