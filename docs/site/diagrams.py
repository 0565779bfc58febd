"""The diagrams in `docs/diagrams`: `python -m docs.site.diagrams` writes them.

Each picture brings its own background and follows the reader's light or dark theme, so it can be read on any page.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from docs.site.markdown import DOCS

FOLDER = DOCS / "diagrams"
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2430; }
.small { font-size: 11.5px; fill: #545b6b; }
.strong { font-weight: 600; }
.code { font-family: ui-monospace, monospace; font-size: 12px; }
.back { fill: #ffffff; stroke: #d5d9e2; }
.zone { fill: #f5f7fb; stroke: #c6ccda; stroke-dasharray: 5 4; }
.box { fill: #ffffff; stroke: #8b93a7; stroke-width: 1.2; }
.key { fill: #e8effd; stroke: #2f6fde; stroke-width: 1.4; }
.hit { fill: #e4f6ea; stroke: #23843f; stroke-width: 1.4; }
.miss { fill: #fdf0e0; stroke: #b5651d; stroke-width: 1.4; }
.line { fill: none; stroke: #545b6b; stroke-width: 1.4; }
.way-a { fill: none; stroke: #2f6fde; stroke-width: 3; }
.way-b { fill: none; stroke: #b5651d; stroke-width: 3; }
.tip { fill: #545b6b; }
@media (prefers-color-scheme: dark) {
text { fill: #e6e8ee; }
.small { fill: #aab1c1; }
.back { fill: #1b1e26; stroke: #3a4050; }
.zone { fill: #222632; stroke: #4a5164; }
.box { fill: #2a2f3c; stroke: #7d869b; }
.key { fill: #1f3257; stroke: #6f9ff0; }
.hit { fill: #1d3b28; stroke: #5cc07d; }
.miss { fill: #43301c; stroke: #dd9a55; }
.line { stroke: #aab1c1; }
.way-a { stroke: #6f9ff0; }
.way-b { stroke: #dd9a55; }
.tip { fill: #aab1c1; }
}
"""
Point = tuple[float, float]


@dataclass
class Picture:
    """An SVG picture in the making.

    Attributes:
        title: What a screen reader says.
        width: In pixels, like all lengths here.
        height: The same.
    """

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, at: Point, words: str, style: str = "", anchor: str = "middle") -> None:
        """Write one line of text; `at` is the middle, the begin or the end of its baseline, by `anchor`."""
        css = f' class="{style}"' if style else ""
        self.parts.append(f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}"{css}>{escape(words)}</text>')

    def box(self, at: Point, size: Point, lines: list[str], style: str = "box") -> None:
        """Draw a box at its upper left corner, with a bold first line and smaller ones below it."""
        (x, y), (width, height) = at, size
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="{style}"/>')
        top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text((x + width / 2, top + 16 * number), line, "small" if number else "strong")

    def zone(self, at: Point, size: Point, title: str) -> None:
        """Draw a dashed area with a title in its upper left corner."""
        (x, y), (width, height) = at, size
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="9" class="zone"/>')
        self.text((x + 12, y + 19), title, "small strong", "start")

    def line(self, *points: Point, style: str = "line", tip: bool = True) -> None:
        """Draw straight lines from point to point, with an arrow's tip at the end."""
        path = " ".join(f"{'M' if not number else 'L'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        marker = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<path d="{path}" class="{style}"{marker}/>')

    def dot(self, at: Point, style: str, label: str) -> None:
        """Draw a node of a tree with its name below."""
        self.parts.append(f'<circle cx="{at[0]:g}" cy="{at[1]:g}" r="11" class="{style}"/>')
        self.text((at[0], at[1] + 4), label, "small strong")

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(self.title)}">'
        )
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0.5 L8 4 L0 7.5 z" class="tip"/></marker></defs>'
        )
        back = f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="10" class="back"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, f"<style>{_STYLE}</style>", tip, back, *self.parts, "</svg>", ""])


def architecture() -> Picture:
    """The processes of a proxy with its sandboxes."""
    picture = Picture("The processes: agents, the proxy, launchers, sandboxes and workers", 900, 470)
    picture.zone((20, 20), (150, 430), "agents, unchanged")
    for number, name in enumerate(("rollout 1", "rollout 2", "rollout 64")):
        picture.box((40, 70 + 120 * number), (110, 54), [name, "an LLM agent"])
    picture.text((95, 262 + 25), "…", "strong")
    picture.zone((200, 20), (300, 430), "the proxy: one process, one event loop")
    picture.box((225, 60), (250, 54), ["control plane", "REST, page, metrics"])
    for number in range(3):
        picture.line((150, 97 + 120 * number), (187, 97 + 120 * number), (187, 197), (223, 197))
    picture.box((225, 170), (250, 54), ["hit path", "call key, record, response: no await"], "hit")
    picture.box((225, 260), (250, 54), ["miss path", "single flight, restore plan, execution"], "miss")
    picture.box((225, 372), (118, 58), ["store", "SQLite, journal"])
    picture.box((357, 372), (118, 58), ["snapshots", "layers, images"])
    picture.line((350, 224), (350, 258))
    picture.line((284, 314), (284, 370))
    picture.line((416, 314), (416, 370))
    picture.zone((530, 20), (350, 430), "what the proxy starts; all of it ends with the proxy")
    picture.box((550, 121), (140, 54), ["launcher", "forks local sandboxes"])
    picture.box((550, 270), (140, 54), ["zygote", "SQL, video engines"])
    picture.box((720, 110), (140, 76), ["local sandbox", "pid 1, anchor, shells,", "tool servers"], "key")
    picture.box((720, 270), (140, 54), ["worker", "a database or a video"], "key")
    picture.box((550, 385), (310, 48), ["CRIU", "while a checkpoint is dumped or restored"])
    for y in (148, 297):
        picture.line((475, 287), (512, 287), (512, y), (548, y))
        picture.line((690, y), (718, y))
    picture.line((790, 186), (790, 228), (870, 228), (870, 409), (862, 409))
    return picture


def request() -> Picture:
    """One request, from the agent to the answer."""
    picture = Picture("One request: hit, wait or miss", 900, 400)
    picture.box((20, 40), (130, 60), ["agent", "POST …/shell/exec"])
    picture.box((190, 40), (150, 60), ["call key", "tool, arguments, body"])
    picture.box((380, 40), (190, 60), ["look up", "at the rollout's node"], "key")
    picture.box((640, 40), (240, 60), ["hit", "recorded response, about 0.1 ms"], "hit")
    picture.line((150, 70), (188, 70))
    picture.line((340, 70), (378, 70))
    picture.line((570, 70), (638, 70))
    picture.text((604, 62), "known", "small")
    picture.box((640, 125), (240, 60), ["wait", "the call runs once for all rollouts"], "hit")
    picture.line((475, 100), (475, 155), (638, 155))
    picture.text((556, 147), "running now", "small")
    picture.text((468, 212), "new", "small", "end")
    picture.line((475, 155), (475, 228))
    picture.zone((20, 230), (860, 150), "miss")
    steps = (
        (["plan", "cheapest way to", "this state"], "box"),
        (["restore", "live sandbox,", "snapshot or root"], "miss"),
        (["replay", "only the calls", "that are missing"], "miss"),
        (["execute", "in the sandbox"], "miss"),
        (["effect", "what changed?", "which node?"], "box"),
        (["record", "durable, then", "the answer"], "box"),
        (["snapshot", "while the model", "thinks"], "key"),
    )
    for number, (lines, style) in enumerate(steps):
        x = 36 + 120 * number
        picture.box((x, 268), (108, 84), lines, style)
        if number:
            picture.line((x - 12, 310), (x - 1, 310))
    return picture


def tree() -> Picture:
    """One task's tree, in which two rollouts share their first calls and then part."""
    picture = Picture("A tree: two rollouts share three calls, then rollout 2 leaves", 900, 330)
    root, cloned, fixed, passed, other, served = (70, 130), (270, 130), (470, 130), (690, 130), (660, 250), (850, 250)
    for start, end, style in (
        (root, cloned, "way-a"), (cloned, fixed, "way-a"), (fixed, passed, "way-a"),
    ):  # fmt: skip
        picture.line((start[0] + 12, start[1] - 3), (end[0] - 12, end[1] - 3), style=style, tip=False)
    for start, end in ((root, cloned), (cloned, fixed)):
        picture.line((start[0] + 12, start[1] + 3), (end[0] - 12, end[1] + 3), style="way-b", tip=False)
    picture.line(
        (fixed[0] + 4, fixed[1] + 11), (fixed[0] + 40, other[1]), (other[0] - 12, other[1]), style="way-b", tip=False
    )
    picture.line((other[0] + 12, other[1]), (served[0] - 12, served[1]), style="way-b", tip=False)
    for at, style, name in (
        (root, "box", "n1"), (cloned, "box", "n2"), (fixed, "key", "n3"), (passed, "box", "n4"), (other, "box", "n5"),
        (served, "box", "n6"),
    ):  # fmt: skip
        picture.dot(at, style, name)
    picture.text((170, 113), "git clone …", "code")
    picture.text((370, 113), "sed -i … money.py", "code")
    picture.text((580, 113), "make dist", "code")
    picture.text((580, 240), "pip install …", "code", "middle")
    picture.text((755, 240), "pytest --pdb &", "code")
    picture.text((70, 165), "root state", "small")
    picture.text((470, 90), "pytest -q", "code")
    picture.text((470, 72), "observation: changed nothing", "small")
    picture.line((461, 121), (455, 97), (485, 97), (479, 119))
    picture.box((385, 180), (86, 40), ["snapshot"], "key")
    picture.line((436, 180), (462, 143))
    picture.line((40, 285), (80, 285), style="way-a", tip=False)
    picture.text((90, 289), "rollout 1: every call is a miss and becomes a record", "small", "start")
    picture.line((40, 308), (80, 308), style="way-b", tip=False)
    picture.text((90, 312), "rollout 2: three hits, then a restore of n3, then misses", "small", "start")
    picture.text((20, 32), "task fix-money", "strong", "start")
    return picture


def lifecycle() -> Picture:
    """The states of a sandbox in the pool."""
    picture = Picture("The life of a sandbox: starting, leased, idle, freezing, closed", 900, 210)
    boxes = {"starting": 40, "leased": 260, "idle": 560, "closed": 750}
    for name, x in boxes.items():
        picture.box((x, 60), (110, 46), [name], "key" if name == "leased" else "box")
    picture.box((410, 140), (110, 46), ["freezing"], "miss")
    picture.line((150, 83), (258, 83))
    picture.text((204, 75), "started", "small")
    picture.line((370, 74), (558, 74))
    picture.text((464, 66), "release", "small")
    picture.line((560, 94), (372, 94))
    picture.text((464, 110), "lease", "small")
    picture.line((315, 106), (315, 163), (408, 163))
    picture.text((350, 155), "freeze", "small")
    picture.line((520, 163), (615, 163), (615, 108))
    picture.text((566, 155), "frozen", "small")
    picture.line((95, 60), (95, 30), (805, 30), (805, 58))
    picture.text((450, 22), "close, from any state", "small")
    picture.line((315, 60), (315, 30), tip=False)
    picture.line((615, 60), (615, 30), tip=False)
    return picture


PICTURES = {"architecture": architecture, "lifecycle": lifecycle, "request": request, "tree": tree}


def main(folder: Path = FOLDER) -> None:
    """Write all pictures."""
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
