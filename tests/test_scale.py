"""benchmarks/scale.py: what it reads from the compiler, and, where TPUs can be compiled for, an offloaded step."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scale import collectives_of, main_memory_temporaries
from benchmarks.scale_rows import Row, extended, read_rows

ROW = Row(
    llm="llama-7b", ssm="llama-68m", target="v5e", devices=2, offload=False, layers=2, ssm_layers=1,
    compiled=((2, 1),), argument_bytes=1_000, temporary_bytes=50, host_bytes=0, layer_bytes=300, weight_bytes=700,
    cache_bytes=200, ssm_bytes=100, flops=8.0, bytes_accessed=900.0, collectives={"all-reduce": 7},
    collective_bytes=70, seconds=3.0,
)  # fmt: skip
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
allocation 1: size 700, preallocated-temp:
 value: <5 copy-start{0} @0> (size=600,offset=0): bf16[300]{0}
allocation 2: size 9000, color 1, preallocated-temp:
allocation 3: size 64, thread-local:
"""


def test_temporaries_are_those_in_main_memory(tmp_path: Path) -> None:
    file = tmp_path / "module_0004.jit_step.after_optimizations-buffer-assignment.txt"
    file.write_text(ASSIGNMENT, encoding="utf-8")
    assert main_memory_temporaries(tmp_path) == 700
    file.write_text(ASSIGNMENT.replace("size 700, preallocated", "size 700, color 1, preallocated"), encoding="utf-8")
    with pytest.raises(ValueError, match="no temporaries in main memory"):
        main_memory_temporaries(tmp_path)


def test_a_line_through_two_depths() -> None:
    kinds = {"all-reduce": 9, "all-gather": 1}
    more = dataclasses.replace(ROW, layers=3, compiled=((3, 1),), argument_bytes=1_300, flops=10.0, collectives=kinds)
    row = extended([ROW, more], 32, 1)
    assert (row.layers, row.argument_bytes, row.flops, row.temporary_bytes) == (32, 1_000 + 30 * 300, 68.0, 50)
    assert row.collectives == {"all-gather": 30, "all-reduce": 7 + 30 * 2}
    assert row.compiled == ((2, 1), (3, 1)) and row.seconds == 6.0
    # A peak may be lower at one depth by chance; that says nothing of the others.
    assert extended([ROW, dataclasses.replace(more, temporary_bytes=20)], 32, 1).temporary_bytes == 50
    deeper = dataclasses.replace(
        ROW, ssm_layers=2, compiled=((2, 2),), argument_bytes=1_020, ssm_bytes=120, collectives={"all-reduce": 8}
    )
    row = extended([ROW, more, deeper], 32, 12)
    assert (row.argument_bytes, row.ssm_bytes, row.flops) == (1_000 + 30 * 300 + 11 * 20, 100 + 11 * 20, 68.0)
    assert row.collectives == {"all-gather": 30, "all-reduce": 67 + 11}


def test_collectives_are_counted_once_with_their_results() -> None:
    text = """
      %a = bf16[8,4]{1,0} all-reduce(%x), replica_groups={}
      %b = ((f32[2]), (f32[8])) all-gather-start(%y), dimensions={0}
      %c = (f32[8]) all-gather-done(%b)
    """
    assert collectives_of(text) == ({"all-reduce": 1, "all-gather": 1}, 8 * 4 * 2 + 8 * 4)


def test_rows_survive_their_file_and_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offloaded = dataclasses.replace(ROW, offload=True, layers=32, compiled=((32, 2),), ssm_layers=2, host_bytes=9)
    rows = [dataclasses.replace(ROW, layers=32, compiled=((2, 2), (3, 2))), offloaded]
    (tmp_path / "s.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows]), encoding="utf-8")
    assert read_rows(tmp_path / "s.json") == rows
    scale.main(["--show", str(tmp_path / "s.json")])
    shown = capsys.readouterr().out
    assert "| llama-7b + llama-68m | v5e | 2 | 2 + 2, 3 + 2 |" in shown
    assert "| llama-7b + llama-68m | v5e, offloaded | 2 | all |" in shown
    assert "| 2.50 |" in shown, "(50 + 700) / 300 layers"


def test_an_offloaded_llm_that_does_not_stream_is_an_error() -> None:
    scale.check_offloaded([dataclasses.replace(ROW, offload=True, weight_bytes=0, temporary_bytes=900)])
    with pytest.raises(SystemExit, match=r"llama-7b on v5e: 3\.0\d layers on the device, more than 3"):
        scale.check_offloaded([dataclasses.replace(ROW, offload=True, weight_bytes=10, temporary_bytes=900)])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the compiler for TPUs")
def test_an_offloaded_step_holds_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(
        scale.PAPER_MODELS["llama-7b"], width=1_024, mlp_width=2_816, num_heads=8, num_kv_heads=8, vocab_size=2_048
    )
    ssm = dataclasses.replace(small, width=128, mlp_width=256, num_layers=1, num_heads=1, num_kv_heads=1)
    monkeypatch.setattr(scale, "PAPER_MODELS", {"llama-7b": small, "llama-68m": ssm})
    monkeypatch.setattr(scale, "PAPER_TREE", "1,1")
    monkeypatch.setattr(scale, "CONTEXT", 512)
    row = scale.compile_row("llama-7b", "v5e", offload=True, devices=1, layers=4, ssm_layers=1)
    assert row.layer_bytes == 2 * (4 * 1_024**2 + 3 * 1_024 * 2_816)
    assert 1.5 * row.layer_bytes <= row.temporary_bytes + row.weight_bytes <= 3 * row.layer_bytes
    assert row.host_bytes == 4 * row.layer_bytes + 2 * 2 * 2_048 * 1_024
