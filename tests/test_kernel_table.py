"""Tests of the table of tiles, the search for faster tiles, and the tool that compiles every kernel."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pairproof.fast import kernels
from pairproof.fast.engine.plan import OMITS
from pairproof.fast.kernels import table, tune
from pairproof.fast.kernels.table import KERNELS, KINDS, PLAIN, Key, Launch, launch_of
from tests.each import each
from tools import compile_kernels as tool

ROOT = Path(__file__).resolve().parent.parent
ARCHS = (80, 89, 90, 100)
DIMS = table.PADDED
NO_TRITON = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(NO_TRITON or kernels.interpreting(), reason="needs triton, and not its interpreter")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Any], Path]]:
    """Write a file of tiles and name it in the environment; the cache is cleared before and after."""
    path = tmp_path / "tiles.json"

    def write(content: Any) -> Path:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(table.VARIABLE, str(path))
        table._in_place.cache_clear()
        return path

    table._in_place.cache_clear()
    yield write
    table._in_place.cache_clear()


def test_the_table_lists_every_architecture_kind_and_length() -> None:
    kinds, dims = ("pieces", "tf32", "bfloat16"), (64, 128, 256, 384, 512, 768)
    assert set(table.committed()) == {Key(*names) for names in itertools.product(KERNELS, kinds, dims, ARCHS)}


@pytest.mark.parametrize("arch", ARCHS)
@each("kind", KINDS)
@each("dim", DIMS)
def test_every_tile_follows_the_rules(arch: int, kind: table.Kind, dim: int) -> None:
    launches = {kernel: launch_of(kernel, kind, dim, arch) for kernel in KERNELS}
    for kernel, launch in launches.items():
        assert table.violations(kernel, launch, dim) == []
        # Tensor cores that read rows from shared or tensor memory need 64 rows.
        assert launch.rows >= (64 if arch in (90, 100) else 32)
        if kernel in PLAIN:
            assert table.disagreements(kernel, launch, launches[PLAIN[kernel]]) == []


@pytest.mark.parametrize(
    ("capability", "arch"),
    [(80, 80), (86, 89), (87, 80), (89, 89), (90, 90), (100, 100), (103, 100), (110, 100), (120, 89), (130, 89)],
)
def test_every_capability_uses_the_tiles_of_an_architecture(capability: int, arch: int) -> None:
    assert table.architecture_of(capability) == arch
    assert launch_of("sums_plain", "bfloat16", 128, capability) == launch_of("sums_plain", "bfloat16", 128, arch)


def test_float16_uses_the_tiles_of_bfloat16() -> None:
    for kernel, dim in itertools.product(KERNELS, DIMS):
        assert launch_of(kernel, "float16", dim, 90) == launch_of(kernel, "bfloat16", dim, 90)


GOOD = Launch(64, 64, 64, 64, 4, 2)


@pytest.mark.parametrize(
    ("launch", "rule"),
    [
        (GOOD._replace(rows=48), "rows: expected one of 32, 64, 128, got 48"),
        (GOOD._replace(rows=256), "rows: expected one of 32, 64, 128, got 256"),
        (GOOD._replace(columns=16), "columns: expected one of 32, 64, 128, got 16"),
        (GOOD._replace(part=8), "part: expected one of 16, 32, 64, got 8"),
        (GOOD._replace(part=128), "part: expected one of 16, 32, 64, got 128"),
        (GOOD._replace(out=0), "out: expected one of 16, 32, 64, got 0"),
        (GOOD._replace(warps=32), "warps: expected one of 1, 2, 4, 8, 16, got 32"),
        (GOOD._replace(stages=0), "stages: expected one of 1, 2, 3, 4, 5, 6, 7, 8, got 0"),
    ],
)
def test_a_violated_rule_is_reported(launch: Launch, rule: str) -> None:
    assert table.violations("sums_plain", GOOD, 192) == []
    assert rule in table.violations("sums_plain", launch, 192)


def entry(**changes: Any) -> dict[str, Any]:
    key = Key("sums_plain", "bfloat16", 128, 90)
    return {**key._asdict(), **launch_of(*key)._asdict(), **changes}


def tiles(*entries: Any) -> dict[str, Any]:
    return {"format": table.FORMAT, "tiles": list(entries)}


def test_a_named_file_replaces_the_table(named: Callable[[Any], Path]) -> None:
    key = Key("sums_plain", "bfloat16", 128, 90)
    committed = launch_of(*key)
    mine = committed._replace(stages=committed.stages + 1)
    named(json.loads(table.written({key: mine}, "a test")))
    assert launch_of(*key) == mine
    for other in (key._replace(dim=64), key._replace(capability=80), key._replace(kernel="positives")):
        assert launch_of(*other) == table._derived(*other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ([], 'expected an object with "format": 1'),
        ({"format": 2, "tiles": []}, 'expected an object with "format": 1'),
        ({"format": 1}, 'expected "tiles", a list of at least one tile'),
        (tiles("x"), "tile 0: expected an object of kernel, kind, dim, capability, rows"),
        (tiles({**entry(), "more": 1}), "tile 0: expected an object of kernel"),
        (tiles(entry(), entry(kernel="sums")), "tile 1: kernel: expected one of sums_plain, .*, got 'sums'"),
        (tiles(entry(kind="int8")), "tile 0: kind: expected one of pieces, .*, got 'int8'"),
        (tiles(entry(warps=True)), "tile 0: warps: expected an integer, got True"),
        (tiles(entry(rows=64.0)), r"tile 0: rows: expected an integer, got 64\.0"),
        (tiles(entry(dim=100)), "tile 0: dim: expected one of 16, .*, got 100"),
        (tiles(entry(capability=75)), "tile 0: capability: expected at least 80, got 75"),
        (tiles(entry(), entry()), "tile 1: sums_plain bfloat16 dim 128 capability 90 already has a tile"),
        (tiles(entry(part=256)), "sums_plain bfloat16 dim 128 .*: part: expected one of 16, 32, 64, 128, got 256"),
        (tiles(entry(rows=32)), "sums_marked .*: rows: expected a divisor of the 32 of sums_plain, got 64"),
    ],
)
def test_an_invalid_file_is_an_error_with_the_reason(named: Callable[[Any], Path], content: Any, message: str) -> None:
    path = named(content)
    with pytest.raises(ValueError, match=f"^PAIRPROOF_KERNEL_TABLE: {path}: .*{message}"):
        launch_of("sums_plain", "bfloat16", 128, 90)


def test_a_missing_file_is_an_error(named: Callable[[Any], Path]) -> None:
    named({}).unlink()
    with pytest.raises(ValueError, match=r"^PAIRPROOF_KERNEL_TABLE: .*cannot be read"):
        launch_of("sums_plain", "bfloat16", 128, 90)


def test_replaced_tiles_are_restored() -> None:
    key = Key("sums_plain", "tf32", 64, 80)
    before = launch_of(*key)
    with table.instead({key: GOOD}):
        with table.instead({key: GOOD._replace(stages=4)}):
            assert launch_of(*key).stages == 4
        assert launch_of(*key) == GOOD
    assert launch_of(*key) == before


class Model:
    """A timer without a device: a formula gives the time of a tile, or None if it does not run."""

    def __init__(self, time_of: Callable[[Key, Launch], float | None]) -> None:
        self.time_of = time_of
        self.timed: list[tuple[Key, Launch]] = []

    def __call__(self, key: Key, launches: Sequence[Launch]) -> list[float | None]:
        self.timed += [(key, launch) for launch in launches]
        return [self.time_of(key, launch) for launch in launches]


def test_the_search_finds_the_fastest_tile() -> None:
    key = Key("sums_plain", "bfloat16", 256, 90)
    start = launch_of(*key)
    found = tune.best_of(key, Model(lambda _, launch: 100.0 / launch.stages if launch.stages < 6 else None))
    assert found.launch == start._replace(stages=min(5, start.stages + tune.STEPS))
    assert found.before == 100.0 / start.stages
    assert found.milliseconds == 100.0 / found.launch.stages


def test_the_search_ignores_gains_within_noise() -> None:
    key = Key("gradient_plain", "pieces", 128, 90)
    start = launch_of(*key)
    found = tune.best_of(key, Model(lambda _, launch: 1.0 if launch == start else 0.99))
    assert found == tune.Timed(start, 1.0, 1.0)


def test_the_search_reports_a_tile_that_does_not_run() -> None:
    with pytest.raises(RuntimeError, match=r"sums_plain: the tile .* does not run on this device"):
        tune.best_of(Key("sums_plain", "tf32", 128, 80), Model(lambda *_: None))


def test_the_search_tries_only_tiles_that_follow_the_rules() -> None:
    def time_of(key: Key, launch: Launch) -> float:
        return 1.0 / (launch.rows * launch.columns)  # larger tiles are faster

    for kind, dim in itertools.product(KINDS, (16, 128, 384)):
        model = Model(time_of)
        found = tune.tune(KERNELS[::-1], kind, dim, 90, model)
        assert set(found) == {Key(kernel, kind, dim, 90) for kernel in KERNELS}
        assert list(found)[:2] == [Key(kernel, kind, dim, 90) for kernel in ("sums_plain", "gradient_plain")]
        for key, launch in model.timed:
            assert table.violations(key.kernel, launch, dim) == []
        for key, timed in found.items():
            if key.kernel in PLAIN:
                plain = found[key._replace(kernel=PLAIN[key.kernel])].launch
                assert table.disagreements(key.kernel, timed.launch, plain) == []


@needs_triton
def test_the_file_of_tuning_can_be_used(
    named: Callable[[Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.json"
    model = Model(lambda _, launch: 1.0 / launch.stages)
    for columns in ("100", "64"):
        arguments = ["--columns", columns, "--dtype", "float32", "--kernel", "sums_plain", "--output", str(output)]
        assert tune.main(arguments, model, 90) == 0
    assert f"written: {output}" in capsys.readouterr().out
    found = table.read(output)
    keys = {Key("sums_plain", "pieces", dim, 90) for dim in (128, 64)}
    assert set(found) == keys
    named(output.read_text())
    for key in keys:
        assert launch_of(*key) == found[key]
        assert found[key].stages == table._derived(*key).stages + tune.STEPS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tf32"], "--tf32: expected --dtype float32 with it, got bfloat16"),
        (["--columns", "1025"], "--columns: expected at least 1, at most 1024, got 1025"),
        (["--rows", "1"], "--rows: expected at least 2, got 1"),
    ],
)
def test_tuning_reports_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.main(arguments, Model(lambda *_: 1.0), 90)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tuning_without_a_device_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([]) == 3
    assert "finds no CUDA device here" in capsys.readouterr().err


@needs_triton
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_timed_pass_launches_the_kernel(kernel: table.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = kernels.evaluation()
    names: list[str] = []
    monkeypatch.setattr(queue, "run", lambda one, grid, given: names.append(one.fn.__name__))
    monkeypatch.setattr(queue, "empty", lambda shape, like, dtype: torch.zeros(shape, dtype=dtype))
    step = tune.EventTimer(64, 16, torch.float32, tf32=False, rounds=1, device="cpu").pass_with(kernel)
    names.clear()
    step()
    assert names.count(kernel) == 1


@needs_triton
@pytest.mark.parametrize("losses", [["nt_xent_loss"], pytest.param(None, marks=pytest.mark.slow)])
def test_the_dry_run_finds_the_same_jobs_for_tensors_without_memory(
    losses: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without memory launch the same variants of kernels as tensors with memory."""
    if losses is not None:
        monkeypatch.setattr(tool.fast, "__all__", losses)
    found = set()
    with tool.dry_run("bfloat16", 128, 90) as queued:
        for call in tool.calls(torch.bfloat16, "meta"):
            queued.clear()
            with contextlib.suppress(ValueError):
                call().sum().backward()
            found |= {tool.job_of(kernel, given, "bfloat16", 128, 90)[:5] for kernel, given in queued}
    assert found == {job[:5] for job in tool.jobs([90], [128], ["bfloat16"])}


@needs_triton
@pytest.mark.slow
def test_calls_with_conflicting_arguments_are_rejected() -> None:
    refused = set()
    with tool.dry_run("pieces", 64, 90) as queued:
        for call in tool.calls(torch.float32):
            queued.clear()
            try:
                call()
            except ValueError as reason:
                refused.add((str(reason).partition(" expected ")[0], len(queued)))
    # The loss of hard negatives does not take dot products, the kernels do not take ids with a mask of positives, and
    # one direction of a loss of two towers takes no partition and, with a queue, no positives and no ids.
    wrong = ("labels:", "partners:", "ref_labels:", "self_rows:", "similarity:", "ignored_ids:", "positives:")
    wrong = (*wrong, "partition:", f'backend="triton": {OMITS}')
    assert refused == {(argument, 0) for argument in wrong}


@needs_triton
@pytest.mark.parametrize("kinds", [("bfloat16",), KINDS])
@pytest.mark.slow
def test_the_jobs_cover_every_kernel_kind_and_length(kinds: Sequence[table.Kind]) -> None:
    every = tool.jobs([90], [64, 128], kinds)
    assert len({job[:5] for job in every}) == len(every)
    tiled = [job for job in every if job.kernel in KERNELS]
    forms = Counter((job.kind, job.dim) for job in tiled)
    assert forms == dict.fromkeys(itertools.product(kinds, (64, 128)), 33)
    assert all(job.machine == (job.dim == 128 or job.constants.get("FIXED") is True) for job in tiled)
    rest = Counter(job.kernel for job in every if job.kernel not in KERNELS)
    along_rows = {"prepare_labels", "prepare", "finish", "omitted", "combine", "combine_positives", "coefficients"}
    assert set(rest) == along_rows
    assert all(job.dim == 128 for job in every if job.kernel in rest)
    for job in tiled:
        launch = launch_of(job.kernel, job.kind, job.dim, job.arch)
        narrow = job.constants.get("IDS") and job.constants["MARKS"] == "pairs"
        columns = 16 if narrow else launch.columns
        assert (job.constants["BM"], job.constants["BN"], job.constants["BK"]) == (launch.rows, columns, launch.part)
        assert dict(job.options) == {"num_warps": launch.warps, "num_stages": launch.stages}
    chosen = tool.covering(every)
    assert len(chosen) < len(every)
    assert {job.form for job in chosen} == {job.form for job in every}
    assert {(job.kernel, *job[5:7]) for job in chosen} == {(job.kernel, *job[5:7]) for job in every}


@needs_triton
@pytest.mark.slow
def test_the_longer_run_has_masks_with_long_strides() -> None:
    arguments: Any = [90], [128], ["bfloat16"], ["sums_marked"]
    longer = tool.jobs(*arguments, long=True)
    assert {job[:5] for job in tool.jobs(*arguments)} < {job[:5] for job in longer}
    found = {kind for job in longer for name, kind, _ in job.arguments if name == "row_stride"}
    assert found - {"constexpr"} == {"i32", "i64"}, "a stride of 1 may also be a constant"


CODE = """
	/*0000*/                   MOV R1, c[0x0][0x28] ;      /* 0x0a */
	/*0010*/                   MUFU.EX2 R2, R3 ;           /* 0x0b */
	/*0020*/                   HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4] ;
	/*0030*/                   MUFU.EX2 R2, R3 ;
	/*0040*/                   MUFU.EX2 R2, R3 ;
	/*0050*/              @!P0 BRA 0x20 ;
	/*0060*/               @P1 BRA 0x10 ;
	/*0070*/              @UP1 STL [R1], R2 ;
	/*0080*/                   ATOMS.OR RZ, [UR5+0x14], R2 ;
	/*0090*/                   REDG.E.ADD.F32.FTZ.RN [R2], R3 ;
	/*00a0*/                   REDUX UR8, R0 ;
	/*00b0*/                   BRA 0xb0;
"""


def test_instructions_are_counted_in_sass() -> None:
    code = tool.instructions_of(CODE)
    assert len(code) == 12
    assert {name: tool.count(code, pattern) for name, pattern in tool.PATTERNS.items()} == {
        "products": 1,
        "exponentials": 3,
        "local": 1,
        "atomics": 1,
    }
    assert tool.exponentials_of(code) == 2
    assert tool.exponentials_of([line for line in code if "HGMMA" not in line[1]]) is None


PTX = """
.visible .entry sums_plain(
{
	.reg .pred 	%p<43>;
	ld.param.b64 	%rd1, [sums_plain_param_0];
$L__BB0_1:
	ex2.approx.ftz.f32 	%r1, %r2;
$L__BB0_2:                              // the loop
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, %p1, 1, 1, 0, 1;
	ex2.approx.ftz.f32 	%r1, %r2;
	@%p1 bra 	$L__BB0_2;
	@!%p2 bra 	$L__BB0_1;
	red.global.add.f32 	[%rd1], %r1;
	redux.sync.max.s32 	%r3, %r4, -1;
	st.local.b32 	[%rd1], %r1;
	ret;
}
"""


def test_instructions_are_counted_in_ptx() -> None:
    code = tool.steps_of(PTX)
    assert {name: tool.count(code, pattern) for name, pattern in tool.PATTERNS.items()} == {
        "products": 1,
        "exponentials": 2,
        "local": 1,
        "atomics": 1,
    }


def test_every_check_can_fail() -> None:
    constants = (("FIXED", "constexpr", True), ("BM", "constexpr", 64), ("BN", "constexpr", 32))
    job = tool.Job("rows", "sums_plain", 90, (("x", "*fp32", "D"), *constants), (("num_warps", 4),), "tf32", 384)
    each = 64 * 32 // (32 * 4)
    good = tool.Found(
        registers=128,
        shared=65536,
        warps=4,
        instructions={"products": 8, "exponentials": each, "local": 0, "atomics": 0},
        exponentials=each,
        rounded=1,
    )
    assert tool.failures(job, good) == []
    for change, message in [
        ({"shared": 232449}, "232449 bytes of shared memory, at most 232448"),
        ({"tensor": 544}, "544 columns of tensor memory, at most 512"),
        ({"stack": 8}, "8 bytes of stack, at most 0"),
        ({"instructions": {**good.instructions, "local": 2}}, r"2 instructions on the stack \(LDL, STL\), at most 0"),
        ({"instructions": {**good.instructions, "products": 0}}, "no HGMMA: products do not use"),
        ({"instructions": {**good.instructions, "atomics": 1}}, "1 atomic instructions, at most 0"),
        ({"exponentials": 2 * each}, f"{2 * each} exponentials per thread and tile, expected {each}"),
        ({"rounded": 0}, "no mul.rn: logits are not rounded"),
        ({"error": "out of registers"}, "did not compile: out of registers"),
    ]:
        (line,) = tool.failures(job, good._replace(**change))
        assert re.match(message, line), line
    assert str(job) == "sums_plain tf32 D=384 sm_90, FIXED=True BM=64 BN=32 num_warps=4"
    # A marked tile may spill registers, but must still fit and use tensor cores.
    timed, spilled = (
        job._replace(kernel="gradient_plain", kind="pieces", dim=512),
        {"stack": 8, "exponentials": 2 * each},
    )
    assert tool.failures(timed, good._replace(**spilled)) == []
    broken = {"shared": 232449, "tensor": 544, "rounded": 0, "instructions": dict.fromkeys(tool.PATTERNS, 1)}
    assert len(tool.failures(timed, good._replace(**broken))) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "70"], "argument --arch: invalid choice: 70"),
        (["--dim", "100"], "argument --dim: invalid choice: 100"),
        (["--kind", "int8"], "argument --kind: invalid choice: 'int8'"),
        (["--jobs", "0"], "argument --jobs: invalid choice: 0"),
    ],
)
def test_the_tool_reports_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_the_tool_without_a_compiler_exits_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "cuobjdump", lambda: None)
    assert tool.main([]) == 3
    assert "triton, with its cuobjdump, is not installed" in capsys.readouterr().err


@needs_triton
@pytest.mark.slow  # compiles two kernels; make kernels-covering compiles more
def test_the_tool_compiles_reports_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, because starting others takes longer than compiling.
    monkeypatch.setattr(tool, "compiled", lambda work, processes: [tool.examine(job) for job in work])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    # One dry run serves every run of the tool.
    found = tool.jobs([90], [64], ["bfloat16"])

    def jobs(archs: Any, dims: Any, kinds: Any, names: list[str], *, long: bool) -> list[tool.Job]:
        assert (archs, dims, kinds, long) == ([90], [64], ["bfloat16"], False)
        return [job for job in found if job.kernel in names]

    monkeypatch.setattr(tool, "jobs", jobs)
    usual = ["--arch", "90", "--dim", "64", "--kind", "bfloat16", "--kernel"]
    given = [*usual, "sums_plain"]
    assert tool.main([*given, "--report", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    fixed = [value for one in report["compiled"] for name, _, value in one["arguments"] if name == "FIXED"]
    assert sorted(fixed) == [False, True]
    for record in report["compiled"]:
        assert record["failures"] == []
        assert record["stack"] == 0
        assert record["instructions"]["products"] > 0
    capsys.readouterr()
    monkeypatch.setitem(tool.DEVICES, 90, tool.DEVICES[90]._replace(shared=16))
    assert tool.main(given) == 1
    printed = capsys.readouterr().err
    assert "sums_plain bfloat16 D=64 sm_90, FIXED=True RAW=True " in printed
    assert "bytes of shared memory, at most 16" in printed
    with pytest.raises(SystemExit, match="2"):
        tool.main([*usual, "matmul"])
    assert "--kernel: expected names of kernels that losses launch, got matmul" in capsys.readouterr().err
