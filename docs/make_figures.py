"""Draw the figures of README and the site into docs/_static, light and dark: `python docs/make_figures.py`.

Numbers are computed by the library (credit) or read from raw values (learning); loop, history and tree have none.
"""

import gzip
import json
from html import escape
from pathlib import Path

import numpy as np

from g2po_trl.credit import StateGraph, g2po, grpo
from g2po_trl.trajectory import Step, Trajectory

DOCS = Path(__file__).parent
RUNS = DOCS.parent / "benchmarks" / "results" / "comparison" / "runs.jsonl.gz"
# Class of a line and of a number -> its colour, in the light and in the dark.
COLOURS = {
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#cf222e", "#f85149"),
    "g2po": ("#1a7f37", "#3fb950"),
    "gigpo": ("#0969da", "#4493f8"),
    "grpo": ("#bc4c00", "#db6d28"),
}
STYLE = """<style>
text { font: 15px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 17px } .small { font-size: 13px; fill: #59636e } .num { font-weight: 600 }
.box { fill: #f6f8fa; stroke: #818b98 } .grid { stroke: #d1d9e0 } .line { fill: none; stroke-width: 2.5 }
.mark { fill: #dafbe1; stroke: #1a7f37 }
LIGHT
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .box { fill: #212830; stroke: #656c76 } .grid { stroke: #3d444d }
.mark { fill: #12361f; stroke: #3fb950 }
DARK
}
</style>"""
for mode, name in enumerate(("LIGHT", "DARK")):
    rules = (f".{k} {{ stroke: {c[mode]} }} text.{k} {{ fill: {c[mode]}; stroke: none }}" for k, c in COLOURS.items())
    STYLE = STYLE.replace(name, "\n".join(rules))
ARROW = (
    '<marker id="{0}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="{0}" d="M1 1L9 5L1 9" fill="none" stroke-width="1.6"/></marker>'
)


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    arrows = "".join(ARROW.format(kind) for kind in ("good", "bad"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, f"<defs>{arrows}</defs>", *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, words: str, width: int = 68, kind: str = "box") -> str:
    place = f'x="{x - width / 2:g}" y="{y - 16:g}" width="{width}" height="32"'
    return f'<rect class="{kind}" {place} rx="8"/>' + text(x, y + 5, words, "", "middle")


def step(start: tuple, end: tuple, action: str, advantages: list[float], dy: int = -24) -> str:
    """An arrow between two places, its action, and the advantages of the steps that took it, `dy` below its middle."""
    kind = "good" if advantages[0] > 0 else "bad"
    ends = f'x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"'
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + dy
    numbers = " and ".join(f"{one:+.2f}".replace("-", "−") for one in advantages)
    line = f'<line class="line {kind}" marker-end="url(#{kind})" {ends}/>'
    return line + text(x, y, action, "small", "middle") + text(x, y + 16, numbers, f"num {kind}", "middle")


def credit() -> tuple[str, str]:
    """The example of docs/method.md: three attempts at one task, by GRPO and by G2PO."""
    walks = [
        (8.0, ("hall", "go to kitchen"), ("kitchen", "open fridge")),
        (0.0, ("hall", "go to cellar"), ("cellar", "wait")),
        (0.0, ("hall", "go to kitchen"), ("kitchen", "look")),
    ]
    group = [
        Trajectory("food", [Step(*one) for one in steps], reward, "success" if reward else "failure")
        for reward, *steps in walks
    ]
    graph = StateGraph.from_groups([group], gamma=0.5)
    by_grpo, by_g2po = grpo(graph).reshape(3, 2), g2po(graph).reshape(3, 2)
    parts = [text(20, 30, "GRPO: one credit for each attempt", "title")]
    for place, (walk, (first, second)) in enumerate(zip(walks, by_grpo)):
        y = 92 + 84 * place
        rooms, end = [walk[1][0], walk[2][0]], "✓ food" if walk[0] else "✗ nothing"
        parts += [box(54, y, rooms[0]), step((88, y), (204, y), walk[1][1], [first]), box(240, y, rooms[1])]
        parts += [step((274, y), (378, y), walk[2][1], [second]), text(386, y + 5, end, "num")]
    left = svg(520, 290, "Credit by GRPO for three attempts at one task", parts)
    parts = [text(10, 30, "G2PO: one credit for each step", "title")]
    parts += [box(44, 176, "hall"), box(280, 106, "kitchen"), box(280, 246, "cellar")]
    parts += [step((78, 164), (242, 114), "go to kitchen, twice", [by_g2po[0][0], by_g2po[2][0]], -48)]
    parts += [step((78, 188), (242, 238), "go to cellar", [by_g2po[1][0]], 30)]
    parts += [step((314, 98), (410, 72), "open fridge", [by_g2po[0][1]], -28), text(418, 76, "✓ food", "num")]
    parts += [step((314, 114), (410, 140), "look", [by_g2po[2][1]], 22), text(418, 146, "✗ nothing", "num")]
    parts += [step((314, 246), (410, 246), "wait", [by_g2po[1][1]]), text(418, 251, "✗ nothing", "num")]
    return left, svg(520, 290, "Credit by G2PO for the same attempts", parts)


def learning() -> str:
    """Success of three methods in training, mean of twelve seeds, and on held-out games afterwards."""
    with gzip.open(RUNS, "rt") as file:
        runs = [run for run in map(json.loads, file) if run["stage"] == "main"]
    left, right, top, bottom, highest, window = 40, 300, 56, 280, 60, 5
    parts = [text(20, 24, "Success in training, %", "title"), text(right + 14, 24, "Held-out", "title")]
    parts += [text(right + 14, 42, "games, at the end", "small")]
    parts += [text((left + right) / 2, bottom + 42, "iterations of 64 episodes", "small", "middle")]
    for percent in range(0, highest + 1, 20):
        y = bottom - (bottom - top) * percent / highest
        parts += [f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.4g}" y2="{y:.4g}"/>']
        parts += [text(left - 8, y + 5, f"{percent}", "small", "end")]
    for place in (0, 20, 40):
        parts += [text(left + (right - left) * place / 40, bottom + 20, f"{place}", "small", "middle")]
    ends = []
    for arm, name in (("g2po", "G2PO"), ("gigpo", "GiGPO"), ("grpo", "GRPO")):
        of_arm = [run for run in runs if run["arm"] == arm]
        curve = 100 * np.mean([run["training"]["success"] for run in of_arm], axis=0)
        smooth = np.convolve(curve, np.ones(window) / window, "valid")
        x = left + (right - left) * (np.arange(len(smooth)) + (window + 1) / 2) / 40
        y = bottom - (bottom - top) * smooth / highest
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
        parts += [f'<polyline class="line {arm}" points="{points}"/>']
        held_out = [np.mean(run["held_out"][-1]["1"]["success_rate"]) for run in of_arm]
        ends.append((y[-1], arm, name, 100 * np.mean(held_out)))
    for place, (_, arm, name, held_out) in enumerate(sorted(ends)):
        parts += [text(right + 14, min(ends)[0] + 24 * place + 5, f"{name} {held_out:.1f} %", f"num {arm}")]
    return svg(450, 330, "Success of G2PO, GiGPO and GRPO in training and on held-out games", parts)


def loop() -> str:
    """One iteration: what goes in and comes out of each stage."""
    stages = [("tasks", "rows of the dataset"), ("rollout", "8 attempts each"), ("trajectories", "plain data")]
    stages += [("state graph", "equal states merge"), ("advantages", "one for each step"), ("loss", "TRL's GRPO")]
    parts, places = [], [75 + 160 * number for number in range(len(stages))]
    for place, (name, note) in zip(places, stages):
        kind = "mark" if name in ("state graph", "advantages") else "box"
        parts += [box(place, 40, name, 116, kind), text(place, 76, note, "small", "middle")]
    for place in places[:-1]:
        parts += [
            f'<line class="line good" marker-end="url(#good)" x1="{place + 58}" y1="40" x2="{place + 101}" y2="40"/>'
        ]
    back = f"M{places[-1]} 86 V112 H{places[1]} V86"
    parts += [f'<path class="line good" marker-end="url(#good)" d="{back}"/>']
    parts += [text((places[1] + places[-1]) / 2, 132, "the updated model plays the next iteration", "small", "middle")]
    return svg(950, 145, "One iteration: tasks, rollout, trajectories, state graph, advantages, loss", parts)


def history() -> str:
    """The prompts of four turns by window and by conversation; what an earlier prompt has already is marked."""
    parts = [text(20, 24, "history: window", "title"), text(440, 24, "history: conversation", "title")]
    for turn in range(1, 5):
        y = 24 + 42 * turn
        past = [part for one in range(1, turn) for part in (f"o{one}", f"a{one}")]
        for left, shown in ((20, past[-4:]), (440, past)):
            in_conversation = left > 20
            parts += [box(left + 28, y, "rules", 56, "mark" if turn > 1 else "box")]
            for number, words in enumerate([*shown, f"o{turn}"]):
                seen = in_conversation and number < len(shown)
                parts += [box(left + 82 + 44 * number, y, words, 40, "mark" if seen else "box")]
    parts += [text(20, 224, "o: observation, a: completion", "small")]
    parts += [text(440, 224, "green: begins the prompt before, so processed once", "small")]
    return svg(880, 236, "Prompts of four turns, by window and by conversation", parts)


def tree() -> str:
    """Three step samples and the tree in which each shared token stands once."""
    parts = [text(20, 24, "three step samples, 11 tokens", "title"), text(400, 24, "one row, 7 tokens", "title")]
    for row, (tokens, shared) in enumerate((("ABcd", 0), ("ABcef", 3), ("Ag", 1))):
        for place, token in enumerate(tokens):
            kind = "mark" if place < shared else "box"
            parts += [box(40 + 44 * place, 62 + 44 * row, token, 40, kind)]
    places = {"A": (420, 106), "B": (500, 84), "c": (580, 84), "d": (660, 62), "e": (660, 106), "f": (740, 106)}
    places["g"] = (500, 150)
    for start, end in ("AB", "Bc", "cd", "ce", "ef", "Ag"):
        (x, y), (to_x, to_y) = places[start], places[end]
        parts += [f'<line class="grid" stroke-width="2" x1="{x + 20}" y1="{y}" x2="{to_x - 20}" y2="{to_y}"/>']
    parts += [box(*place, token, 40) for token, place in places.items()]
    parts += [text(20, 196, "green: already in an earlier sample", "small")]
    parts += [text(400, 196, "a token attends to the tokens on its way from the root", "small")]
    return svg(800, 210, "Step samples with common prefixes, and the tree that is processed", parts)


if __name__ == "__main__":
    figures = dict(zip(("credit_grpo", "credit_g2po"), credit()))
    figures |= {draw.__name__: draw() for draw in (learning, loop, history, tree)}
    for name, figure in figures.items():
        (DOCS / "_static" / f"{name}.svg").write_text(figure, encoding="utf-8")
