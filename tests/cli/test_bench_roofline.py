"""`pagedcore bench kernels`: every case is right before it is timed, and set against the right roof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore import cli
from pagedcore.commands.bench.results import read_results
from support.bench_runs import ALL
from support.triton_interpreter import needs_triton, run_interpreted

pytestmark = pytest.mark.needs_torch


def write_config(folder: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **shape, **sizes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@needs_triton
def test_each_case_gives_what_its_reference_gives_under_the_interpreter() -> None:
    run_interpreted("bench_roofline.py")


@needs_triton
def test_the_shapes_are_those_of_the_models_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from pagedcore.commands.bench import kernel_shares
    from pagedcore.commands.bench.roofline import measure
    from pagedcore.commands.bench.roofline.case import Shape
    from pagedcore.commands.bench.roofline.roofs import Roofs

    seen: list[Shape] = []
    roofs = Roofs(read_bytes_per_s=4.3712e12, copy_bytes_per_s=4.3e12, matmul_flops_per_s=7.8e14)
    monkeypatch.setattr(kernel_shares, "check_gpu", lambda command: None)
    monkeypatch.setattr(kernel_shares, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(measure, "measure_kernels", lambda shape, *_: seen.append(shape) or (roofs, ALL[4].points))
    write_config(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kernels", str(tmp_path), "--json", str(tmp_path / "run.json")])
    assert not ended.value.code
    assert seen == [Shape(8, 2, 64, 512, 1024, 4096, torch.bfloat16)]
    run = read_results(tmp_path / "run.json")
    assert (run.facts["model"], run.facts["dtype"], run.facts["num_attention_heads"]) == (tmp_path.name, "bfloat16", 8)
    assert (run.work["read_tb_per_s"], run.work["copy_tb_per_s"], run.work["matmul_tflop_per_s"]) == (4.371, 4.3, 780.0)


def measured_on_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`bench products` with a clock that gives packed weights 4 us and those in 16 bit 6 us."""
    import torch

    from pagedcore.commands.bench import kernel_shares
    from pagedcore.commands.bench.roofline import packed
    from pagedcore.commands.bench.roofline.case import Shape
    from pagedcore_kernels import linear

    shape = Shape(8, 2, 64, 512, 1024, 4096, torch.bfloat16 if "float32" not in arguments else torch.float32, "cpu", 500_000)
    monkeypatch.setattr(kernel_shares, "check_gpu", lambda command: None)
    monkeypatch.setattr(kernel_shares, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(kernel_shares, "_shape_of", lambda model_dir, dtype: shape)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(packed, "measure_memory", lambda rounds: (4e11, 4e11))
    monkeypatch.setattr(packed, "time_replays", lambda calls, estimate_us, rounds: [6.0 if calls[0].func is linear else 4.0] * rounds)
    write_config(folder)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "products", str(folder), "--json", str(folder / "run.json"), *arguments])
    return int(ended.value.code or 0)


@needs_triton
@pytest.mark.parametrize("flags", [(), ("--zero-points",), ("--bits", "8", "--group-size", "96")])
def test_products_set_packed_weights_beside_16_bit_for_each_matrix_of_a_layer(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_on_a_cpu(tmp_path, monkeypatch, "--rows", "1,5", "--rounds", "2", *flags) == 0
    run = read_results(tmp_path / "run.json")
    sizes = {"qkv": (512, 768), "out": (512, 512), "gate, up": (512, 2048), "down": (1024, 512)}
    assert [(point["matrix"], point["in_features"], point["out_features"], point["rows"]) for point in run.points] == [
        (name, *size, rows) for name, size in sizes.items() for rows in (1, 5)
    ]
    assert all(point["speed_up"] == 1.5 for point in run.points)
    bits, group = (8, 96) if "8" in flags else (4, 128)
    assert (run.work["bits"], run.work["group_size"]) == (bits, group)
    assert run.work["zero_points"] == ("of each group" if flags == ("--zero-points",) else "one for all")
    num_bytes = 512 * 768 * bits / 8 + 768 * 4 * -(-512 // group)
    assert run.points[0]["share"] == pytest.approx(num_bytes / (4e-6 * 4e11), rel=0.05)


@needs_triton
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group-size", "100"), "--group-size is 100 and must be a multiple of 32"),
        (("--dtype", "float32"), "Packed weights are multiplied with 16-bit activations; with float32 take --dtype float16 or bfloat16."),
    ],
)
def test_products_that_the_kernels_do_not_make_are_refused(
    flags: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured_on_a_cpu(tmp_path, monkeypatch, *flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_packed_products_are_right_and_have_a_time_beside_16_bit(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "products", str(tmp_path), "--rows", "1,16,64,300", "--rounds", "3", "--json", str(tmp_path / "run.json")])
    assert not ended.value.code
    run = read_results(tmp_path / "run.json")
    assert len(run.points) == 16
    assert all(isinstance(point["share"], float) and 0 < point["share"] < 1.5 for point in run.points)


@pytest.mark.gpu
def test_on_a_gpu_each_case_is_right_and_has_a_share_of_its_roof(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kernels", str(tmp_path), "--rounds", "3", "--json", str(tmp_path / "run.json")])
    assert not ended.value.code
    run = read_results(tmp_path / "run.json")
    assert {str(point["kernel"]) for point in run.points} >= {"decode attention", "prefill attention", "linear qkv", "norm"}
    assert all(isinstance(point["share"], float) and 0 < point["share"] < 1.5 for point in run.points)


@needs_triton
def test_a_wrong_kernel_is_an_error_and_no_number() -> None:
    import torch

    from pagedcore.commands.bench.roofline.case import Case, Work
    from pagedcore.commands.bench.roofline.measure import check
    from pagedcore.errors import EngineError

    def work(actual: list[float], expected: list[float]) -> Work:
        return Work([lambda: torch.tensor(actual)], lambda: torch.tensor(expected))

    case = Case("norm", "2 tokens", "copy", 1.0, lambda: work([1.0], [1.0]))
    check(case.name, work([1.0, 2.0], [1.0, 2.001]))
    for wrong in ([1.0, 2.1], [1.0, float("nan")]):
        with pytest.raises(EngineError, match="norm, 2 tokens: the result differs from the reference"):
            check(case.name, work(wrong, [1.0, 2.0]))


def test_of_sampled_tokens_one_may_differ() -> None:
    import torch

    from pagedcore.commands.bench.roofline.case import Work

    def error(actual: list[int]) -> float:
        return Work([lambda: torch.tensor(actual)], lambda: torch.tensor([1, 2, 3, 4])).relative_error()

    assert error([1, 2, 3, 4]) == error([1, 2, 3, 9]) == 0.0
    assert error([1, 2, 8, 9]) == 0.25


@needs_triton
@pytest.mark.parametrize(
    ("roof", "amount", "us", "rate", "unit", "share"),
    [
        ("read", 4e6, 2.0, 2.0, "TB/s", 0.5),
        ("copy", 4e6, 2.0, 2.0, "TB/s", 1.0),
        ("matmul", 4e8, 2.0, 200.0, "TFLOP/s", 0.25),
    ],
)
def test_a_share_is_of_the_roof_that_bounds_the_kernel(roof: str, amount: float, us: float, rate: float, unit: str, share: float) -> None:
    from pagedcore.commands.bench.roofline.case import Case
    from pagedcore.commands.bench.roofline.measure import point_of
    from pagedcore.commands.bench.roofline.roofs import Roofs
    from pagedcore.commands.bench.spread import Spread

    roofs = Roofs(read_bytes_per_s=4e12, copy_bytes_per_s=2e12, matmul_flops_per_s=8e14)
    point = point_of(Case("k", "w", roof, amount, lambda: None), Spread(us, (us,)), roofs)  # type: ignore[arg-type, return-value]
    assert (point["rate"], point["unit"], point["share"]) == (pytest.approx(rate), unit, pytest.approx(share))


@pytest.mark.parametrize(
    ("num_calls", "estimate_us", "repeats"), [(1, 1500.0, 1), (1, 100.0, 15), (4, 1.0, 150), (64, 5000.0, 1), (1000, 1.0, 1)]
)
def test_a_graph_lasts_long_enough_to_be_timed_and_has_an_end(num_calls: int, estimate_us: float, repeats: int) -> None:
    from pagedcore.commands.bench.roofline.timer import num_repeats

    assert num_repeats(num_calls, estimate_us) == repeats
