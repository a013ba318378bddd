"""Drawings of token trees: told apart by sign and line style, true to the steps they show."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console
from tiny_model import TOKENIZER, write_folder

from specinfer_jax.config import Speculation
from specinfer_jax.errors import PromptError
from specinfer_jax.opened import Model, open_model
from specinfer_jax.trace import TracedNode, TracedStep, trace_steps
from specinfer_jax.visualize import draw_step, legend, to_svg, to_terminal, visible

SVG = "{http://www.w3.org/2000/svg}"
WORDS = {1: b" the", 2: b" cat", 3: b" dog", 4: b" sat", 5: b"\n", 6: b" <b>&", 7: b" on"}
STEP = TracedStep(
    nodes=[
        TracedNode(1, None, "root", ()),
        TracedNode(2, 0, "accepted", ("ssm", "ngram")),
        TracedNode(3, 0, "proposed", ("ssm",)),
        TracedNode(4, 1, "accepted", ("ssm",)),
        TracedNode(5, 1, "proposed", ("ngram",)),
        TracedNode(6, 2, "proposed", ("ssm",)),
    ],
    committed=[2, 4, 7],
    bonus=7,
)
PICTURE = draw_step(3, STEP, WORDS.__getitem__)


def text_of(renderable: object, width: int = 80) -> str:
    console = Console(width=width, file=None, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_terminal_drawing_without_colour() -> None:
    assert text_of(to_terminal(PICTURE)).splitlines() == [
        "step 3: 5 proposed, 2 accepted, 3 tokens committed",
        "└── ■ ␣the",
        "    ├── ✔ ␣cat ssm+ngram",
        "    │   ├── ✔ ␣sat ssm ─ ★ ␣on",
        "    │   └── ○ ⏎ ngram",
        "    └── ○ ␣dog ssm ─ ○ ␣<b>& ssm",
    ]


def test_a_step_without_proposals_and_without_bonus() -> None:
    alone = TracedStep([TracedNode(1, None, "root", ())], [2], 2)
    assert text_of(to_terminal(draw_step(1, alone, WORDS.__getitem__))).splitlines() == [
        "step 1: 0 proposed, 0 accepted, 1 token committed",
        "└── ■ ␣the ─ ★ ␣cat",
    ]
    # An accepted token ended the answer: nothing follows it.
    ended = TracedStep([TracedNode(1, None, "root", ()), TracedNode(2, 0, "accepted", ("ssm",))], [2], None)
    assert "★" not in text_of(to_terminal(draw_step(1, ended, WORDS.__getitem__)))


def test_the_legend_fits_a_line() -> None:
    assert text_of(legend()) == "■ last committed   ✔ accepted   ○ proposed only   ★ bonus token of the LLM\n"


@pytest.mark.parametrize(
    ("token", "shown"),
    [(b" the", "␣the"), (b"\t\n\r", "⇥⏎␍"), (b"\xe6\x97", r"\xe6\x97"), ("日".encode(), "日"), (b"", "∅"),
     (b"\x1b[31m", r"\x1b[31m"), ("\u200b\u2028".encode(), r"\u200b\u2028")],
)  # fmt: skip
def test_tokens_are_made_visible(token: bytes, shown: str) -> None:
    assert visible(token) == shown


def test_svg_tells_states_apart_by_line_style() -> None:
    root = ET.fromstring(to_svg([PICTURE, PICTURE]))
    paths = root.findall(f"{SVG}path")
    styles = [(path.get("stroke-dasharray"), path.get("stroke-width")) for path in paths]
    proposed, accepted, bonus = ("4 3", "1.2"), (None, "3"), ("1 6", "3")
    assert styles == 2 * [proposed, proposed, proposed, accepted, accepted, bonus]  # accepted ones over the others
    texts = ["".join(text.itertext()) for text in root.findall(f"{SVG}text")]
    assert texts[:4] == ["■ last committed", "✔ accepted", "○ proposed only", "★ bonus token of the LLM"]
    assert texts[4:12] == [
        "step 3: 5 proposed, 2 accepted, 3 tokens committed", "■ ␣the", "✔ ␣cat ssm+ngram", "○ ␣dog ssm",
        "✔ ␣sat ssm", "○ ⏎ ngram", "○ ␣<b>& ssm", "★ ␣on",
    ]  # fmt: skip
    dashed = [rect for rect in root.findall(f"{SVG}rect") if rect.get("stroke-dasharray")]
    assert len(dashed) == 2 * 3 + 1  # and the legend's


def test_svg_boxes_do_not_overlap_and_lie_inside() -> None:
    root = ET.fromstring(to_svg([PICTURE]))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = [
        tuple(float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        for rect in root.findall(f"{SVG}rect")
        if rect.get("height") == "24"
    ]
    assert len(boxes) == 7 + 4
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0
        assert x + w <= width
        assert y + h <= height
        for u, v, a, b in boxes[:i]:
            assert x >= u + a or u >= x + w or y >= v + b or v >= y + h


def test_control_characters_never_break_the_svg() -> None:
    nodes = [TracedNode(i, None if i == 0 else i - 1, "root" if i == 0 else "proposed", ()) for i in range(32)]
    picture = draw_step(1, TracedStep(nodes, [200], 200), lambda i: bytes([i]))
    ET.fromstring(to_svg([picture]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_folder(tmp_path_factory.mktemp("model") / "tiny")
    return open_model(folder, dtype=np.dtype("float32"))


@pytest.fixture(scope="module")
def other(model: Model) -> Model:
    """Agrees with the model now and then."""
    head = model.params["head"]
    noise_VD = np.random.default_rng(0).normal(size=head["kernel"].shape).astype(np.float32)
    params = {**model.params, "head": {**head, "kernel": head["kernel"] + 0.1 * noise_VD}}
    return model._replace(params=params, location="other")


def trace(model: Model, speculation: Speculation, steps: int, **settings: int) -> list[TracedStep]:
    ids = TOKENIZER.encode("one two three one two three one two")
    dtype = np.dtype("float32")
    return list(trace_steps(model, ids, speculation=speculation, num_steps=steps, dtype=dtype, **settings))


def test_traced_steps_are_those_of_decoding(model: Model, other: Model) -> None:
    plain = trace(model, Speculation.off(), 12)
    greedy = [step.committed[0] for step in plain]
    assert all(len(step.nodes) == 1 and step.committed == [step.bonus] for step in plain)

    both = trace(model, Speculation(ssms=(other,), tree="1,2", ngram=True), 4)
    committed = [token for step in both for token in step.committed]
    assert committed[:12] == greedy[: len(committed)]
    assert {name for step in both for node in step.nodes for name in node.speculators} == {"ssm", "ngram"}
    for step in both:
        accepted = [node.token_id for node in step.nodes if node.state == "accepted"]
        assert step.committed == [*accepted, step.bonus]
        for number, node in enumerate(step.nodes):
            assert node.parent is None if number == 0 else node.parent < number
    # A step's root is the last token of the step before.
    assert [step.nodes[0].token_id for step in both[1:]] == [step.committed[-1] for step in both[:-1]]


def test_a_trace_ends_with_the_context(model: Model) -> None:
    count = len(TOKENIZER.encode("one two three one two three one two"))
    steps = trace(model, Speculation(ssms=(model,), tree="1,1"), 50, max_model_len=count + 5)
    assert [len(step.committed) for step in steps] == [3, 2]  # the second tree is clipped to the room left
    with pytest.raises(PromptError, match=f"the prompt has {count} tokens; it must have at least 1 and at most 4"):
        trace(model, Speculation.off(), 1, max_model_len=5)
