"""Rooms, furniture and objects, from ALFRED's tables in the installed alfworld package."""

from __future__ import annotations

from typing import NamedTuple

from alfworld.gen import constants

# Furniture of each kind of room and how many of it there may be; the official rooms' kinds, our numbers.
ROOMS = {
    "kitchen": {
        "Cabinet": 16,
        "CoffeeMachine": 1,
        "CounterTop": 3,
        "DiningTable": 2,
        "Drawer": 12,
        "Fridge": 1,
        "GarbageCan": 1,
        "Microwave": 1,
        "Shelf": 3,
        "SideTable": 1,
        "SinkBasin": 1,
        "StoveBurner": 4,
        "Toaster": 1,
    },
    "bedroom": {
        "ArmChair": 2,
        "Bed": 1,
        "Cabinet": 4,
        "Desk": 2,
        "DiningTable": 1,
        "Drawer": 10,
        "Dresser": 2,
        "GarbageCan": 1,
        "LaundryHamper": 1,
        "Ottoman": 1,
        "Safe": 1,
        "Shelf": 10,
        "SideTable": 2,
        "Sofa": 1,
    },
    "living room": {
        "ArmChair": 3,
        "Cabinet": 8,
        "CoffeeTable": 2,
        "Desk": 1,
        "DiningTable": 2,
        "Drawer": 10,
        "Dresser": 1,
        "GarbageCan": 1,
        "Ottoman": 1,
        "Safe": 1,
        "Shelf": 8,
        "SideTable": 3,
        "Sofa": 2,
        "TVStand": 1,
    },
    "bathroom": {
        "BathtubBasin": 1,
        "Cabinet": 8,
        "Cart": 1,
        "CounterTop": 2,
        "Drawer": 6,
        "GarbageCan": 1,
        "HandTowelHolder": 2,
        "Shelf": 4,
        "SideTable": 1,
        "SinkBasin": 2,
        "Toilet": 1,
        "ToiletPaperHanger": 1,
        "TowelHolder": 2,
    },
}

# What each piece of furniture can hold; sliced objects come into being only while playing.
HOLDS: dict[str, frozenset[str]] = {
    name: frozenset(thing for thing in things if not thing.endswith("Sliced"))
    for name, things in constants.VAL_RECEPTACLE_OBJECTS.items()
}
OPENABLE = frozenset(constants.OPENABLE_CLASS_LIST)
PROPERTIES = {name.lower(): frozenset(things) for name, things in constants.VAL_ACTION_OBJECTS.items()}
PROPERTIES.pop("toggleable")

TOOLS = {
    "pick_clean_then_place_in_recep": "SinkBasin",
    "pick_heat_then_place_in_recep": "Microwave",
    "pick_cool_then_place_in_recep": "Fridge",
}


class Lamp(NamedTuple):
    name: str
    rooms: frozenset[str]
    spots: frozenset[str]


# The only lamp of the official tasks, and where it stands there.
LAMP = Lamp("DeskLamp", frozenset({"bedroom", "living room"}), frozenset({"SideTable", "Desk", "Dresser", "Shelf"}))

RECEPTACLE_TYPES = tuple(sorted({*HOLDS, *constants.STATIC_RECEPTACLES} - set(constants.MOVABLE_RECEPTACLES)))
OBJECT_TYPES = tuple(sorted(set(constants.OBJECTS) - set(RECEPTACLE_TYPES)))
